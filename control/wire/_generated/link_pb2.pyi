from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    CALL: _ClassVar[Kind]
    REPLY: _ClassVar[Kind]
    ERROR: _ClassVar[Kind]
    AGENT: _ClassVar[Kind]
    PING: _ClassVar[Kind]
    BYE: _ClassVar[Kind]
    CREDIT: _ClassVar[Kind]
    GIVE_BACK: _ClassVar[Kind]
    CAST: _ClassVar[Kind]
    GATHER: _ClassVar[Kind]
    TREE: _ClassVar[Kind]
    VALUE: _ClassVar[Kind]
KIND_UNSPECIFIED: Kind
CALL: Kind
REPLY: Kind
ERROR: Kind
AGENT: Kind
PING: Kind
BYE: Kind
CREDIT: Kind
GIVE_BACK: Kind
CAST: Kind
GATHER: Kind
TREE: Kind
VALUE: Kind

class Process(_message.Message):
    __slots__ = ("id", "address", "name")
    ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    id: str
    address: str
    name: str
    def __init__(self, id: _Optional[str] = ..., address: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("axes", "sizes")
    AXES_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    axes: _containers.RepeatedScalarFieldContainer[str]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, axes: _Optional[_Iterable[str]] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...
