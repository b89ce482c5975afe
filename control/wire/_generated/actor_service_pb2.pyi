from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_PICKLE: _ClassVar[Encoding]
    ENCODING_JSON: _ClassVar[Encoding]

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    RAISED: _ClassVar[ErrorCode]
    HANDLE_EXPIRED: _ClassVar[ErrorCode]
    NO_SUCH_ACTOR: _ClassVar[ErrorCode]
    NO_SUCH_METHOD: _ClassVar[ErrorCode]
    BUSY: _ClassVar[ErrorCode]
    LATE: _ClassVar[ErrorCode]
    ACTOR_DEAD: _ClassVar[ErrorCode]
    NO_SUCH_OPERATION: _ClassVar[ErrorCode]
    CANCELLED: _ClassVar[ErrorCode]
    BAD_ARGUMENTS: _ClassVar[ErrorCode]
    BAD_RESULT: _ClassVar[ErrorCode]
ENCODING_PICKLE: Encoding
ENCODING_JSON: Encoding
ERROR_CODE_UNSPECIFIED: ErrorCode
RAISED: ErrorCode
HANDLE_EXPIRED: ErrorCode
NO_SUCH_ACTOR: ErrorCode
NO_SUCH_METHOD: ErrorCode
BUSY: ErrorCode
LATE: ErrorCode
ACTOR_DEAD: ErrorCode
NO_SUCH_OPERATION: ErrorCode
CANCELLED: ErrorCode
BAD_ARGUMENTS: ErrorCode
BAD_RESULT: ErrorCode

class ActorRequest(_message.Message):
    __slots__ = ("actor_handle", "method", "args", "encoding", "buffers", "actor", "proof")
    ACTOR_HANDLE_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    actor_handle: str
    method: str
    args: bytes
    encoding: Encoding
    buffers: _containers.RepeatedScalarFieldContainer[bytes]
    actor: str
    proof: bytes
    def __init__(self, actor_handle: _Optional[str] = ..., method: _Optional[str] = ..., args: _Optional[bytes] = ..., encoding: _Optional[_Union[Encoding, str]] = ..., buffers: _Optional[_Iterable[bytes]] = ..., actor: _Optional[str] = ..., proof: _Optional[bytes] = ...) -> None: ...

class ActorResponse(_message.Message):
    __slots__ = ("result", "buffers", "error", "proof")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    result: bytes
    buffers: _containers.RepeatedScalarFieldContainer[bytes]
    error: Error
    proof: bytes
    def __init__(self, result: _Optional[bytes] = ..., buffers: _Optional[_Iterable[bytes]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "traceback", "cause", "cause_buffers")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_BUFFERS_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    message: str
    traceback: str
    cause: bytes
    cause_buffers: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ..., traceback: _Optional[str] = ..., cause: _Optional[bytes] = ..., cause_buffers: _Optional[_Iterable[bytes]] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("version", "nonce")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    version: int
    nonce: bytes
    def __init__(self, version: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session", "proof")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    proof: bytes
    def __init__(self, session: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class ListMethodsRequest(_message.Message):
    __slots__ = ("actor_handle", "actor", "proof")
    ACTOR_HANDLE_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    actor_handle: str
    actor: str
    proof: bytes
    def __init__(self, actor_handle: _Optional[str] = ..., actor: _Optional[str] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Method(_message.Message):
    __slots__ = ("name", "signature", "doc", "idempotent")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    DOC_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    signature: str
    doc: str
    idempotent: bool
    def __init__(self, name: _Optional[str] = ..., signature: _Optional[str] = ..., doc: _Optional[str] = ..., idempotent: bool = ...) -> None: ...

class ListMethodsResponse(_message.Message):
    __slots__ = ("methods", "error", "proof")
    METHODS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    methods: _containers.RepeatedCompositeFieldContainer[Method]
    error: Error
    proof: bytes
    def __init__(self, methods: _Optional[_Iterable[_Union[Method, _Mapping]]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., proof: _Optional[bytes] = ...) -> None: ...

class ListActorsRequest(_message.Message):
    __slots__ = ("actor", "namespace", "proof")
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    actor: str
    namespace: str
    proof: bytes
    def __init__(self, actor: _Optional[str] = ..., namespace: _Optional[str] = ..., proof: _Optional[bytes] = ...) -> None: ...

class ActorInfo(_message.Message):
    __slots__ = ("name", "actor_handle", "class_name")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ACTOR_HANDLE_FIELD_NUMBER: _ClassVar[int]
    CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    actor_handle: str
    class_name: str
    def __init__(self, name: _Optional[str] = ..., actor_handle: _Optional[str] = ..., class_name: _Optional[str] = ...) -> None: ...

class ListActorsResponse(_message.Message):
    __slots__ = ("actors", "proof")
    ACTORS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    actors: _containers.RepeatedCompositeFieldContainer[ActorInfo]
    proof: bytes
    def __init__(self, actors: _Optional[_Iterable[_Union[ActorInfo, _Mapping]]] = ..., proof: _Optional[bytes] = ...) -> None: ...

class StartOperationRequest(_message.Message):
    __slots__ = ("id", "request", "proof")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    id: str
    request: ActorRequest
    proof: bytes
    def __init__(self, id: _Optional[str] = ..., request: _Optional[_Union[ActorRequest, _Mapping]] = ..., proof: _Optional[bytes] = ...) -> None: ...

class PollOperationRequest(_message.Message):
    __slots__ = ("id", "wait_s", "proof")
    ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    id: str
    wait_s: float
    proof: bytes
    def __init__(self, id: _Optional[str] = ..., wait_s: _Optional[float] = ..., proof: _Optional[bytes] = ...) -> None: ...

class CancelOperationRequest(_message.Message):
    __slots__ = ("id", "proof")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    id: str
    proof: bytes
    def __init__(self, id: _Optional[str] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("id", "done", "response", "error", "proof")
    ID_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    id: str
    done: bool
    response: ActorResponse
    error: Error
    proof: bytes
    def __init__(self, id: _Optional[str] = ..., done: bool = ..., response: _Optional[_Union[ActorResponse, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., proof: _Optional[bytes] = ...) -> None: ...
