"""Values to payloads and back: cloudpickle, protocol 5, large buffers out of band.

Classes and functions of the script's ``__main__``, and of modules that a child process could not import (a test file
that pytest loaded by path), travel by value; everything else by reference. Payloads are unpacked only after the link
that brought them has been authenticated.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from skipper.control.model.errors import PayloadError
from skipper.control.model.exception_text import is_interrupt, summarize
from skipper.control.wire._plain import pickle_arguments, pickle_value
from skipper.control.wire.bulk import BULK_NBYTES, Incoming, Outgoing
from skipper.control.wire.messages import Payload, Whole

OUT_OF_BAND_NBYTES = 16 << 10
"""Buffers from this size on travel next to the pickle instead of within it."""

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
"""Types that the C pickler handles by itself, whatever their values."""

_ARGUMENTS = ("args", "kwargs")

_NAMED = (type, types.FunctionType)
"""Types whose objects travel by name, or by value if other processes would not find that name."""

_NO_FILE = "<dynamic-code>"
"""The file name that cloudpickle gives to all code."""

_examined: set[str] = {"__main__", "builtins"}
_found: set[str] = {"builtins"}
"""The examined modules that other processes find, too."""


def pack(value: object, *, lend: bool = False, name: str | tuple[str, ...] = "the value") -> Payload:
    """A payload that holds its own copy of ``value``, which may be changed afterwards.

    Args:
        value: what to pack.
        lend: whether large segments may be lent (see `bulk`): for payloads that are sent, and unpacked once.
        name: of the value, for people; or of each element, if it is a tuple.

    Raises:
        PayloadError: the value cannot be pickled; the message says which part of it.
    """
    if (pickled := pickle_value(value)) is not None:
        return (pickled,)
    if lend:
        value = _lift(value)
    if type(value) in _PLAIN:
        return (_head(pickle.dumps(value, protocol=5), lend=lend),)
    buffers: list[bytearray | Outgoing] = []

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        with buffer.raw() as raw:
            if raw.nbytes < OUT_OF_BAND_NBYTES:
                return True
            if lend and raw.nbytes >= BULK_NBYTES:
                source = raw.obj
                # A view of a part of ``bytes`` has the whole object as its source.
                buffers.append(Outgoing(source if isinstance(source, bytes) and len(source) == raw.nbytes else raw))
            else:
                buffers.append(bytearray(raw))
        return False

    sink = io.BytesIO()
    try:
        _Pickler(sink, protocol=5, buffer_callback=in_band).dump(value)
    except BaseException as error:  # __reduce__ belongs to a user
        if is_interrupt(error):
            raise
        raise PayloadError(f"cannot pickle {_culprit(value, name)}: {summarize(error)}") from error
    return (_head(sink.getvalue(), lend=lend), *buffers)


def pack_inert(value: object, *, name: str | tuple[str, ...] = "the value") -> tuple[bytes, ...]:
    """`pack`, but as plain bytes that can be pickled again.

    Raises:
        PayloadError: the value cannot be pickled.
    """
    return tuple(bytes(segment) for segment in pack(value, name=name) if not isinstance(segment, Outgoing | Incoming))


def pack_construction(cls: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> Payload:
    """`pack((cls, args, kwargs))`, for an actor that is to be constructed elsewhere.

    Raises:
        PayloadError: the class or an argument cannot be pickled.
    """
    return pack((cls, args, kwargs), name=("the class", *_ARGUMENTS))


def pack_arguments(args: tuple[object, ...], kwargs: dict[str, object]) -> Payload:
    """`pack((args, kwargs), lend=True)`, with a fast path for plain arguments.

    Raises:
        PayloadError: an argument cannot be pickled.
    """
    if (pickled := pickle_arguments(args, kwargs)) is not None:
        return (pickled,)
    if all(map(_is_plain, args)) and (not kwargs or all(map(_is_plain, kwargs.values()))):
        return (_head(pickle.dumps((args, kwargs), protocol=5), lend=True),)
    args, kwargs = tuple(map(_lift, args)), {name: _lift(value) for name, value in kwargs.items()}
    return pack((args, kwargs), lend=True, name=_ARGUMENTS)


def pack_inert_arguments(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[bytes, ...]:
    """`pack_inert((args, kwargs))`, with a fast path for plain arguments.

    Raises:
        PayloadError: an argument cannot be pickled.
    """
    if all(map(_is_plain, args)) and (not kwargs or all(map(_is_plain, kwargs.values()))):
        return (pickle.dumps((args, kwargs), protocol=5),)
    return pack_inert((args, kwargs), name=_ARGUMENTS)


def _is_plain(value: object) -> bool:
    kind = type(value)
    return kind in _PLAIN and not (kind is bytes and len(value) >= BULK_NBYTES)  # type: ignore[arg-type]


def _lift(value: object) -> object:
    """Make large ``bytes`` travel next to the pickle; other types do that by themselves."""
    return pickle.PickleBuffer(value) if type(value) is bytes and len(value) >= BULK_NBYTES else value


def _head(pickled: bytes, *, lend: bool) -> bytes | Outgoing:
    return Outgoing(pickled) if lend and len(pickled) >= BULK_NBYTES else pickled


def unpack(payload: Payload, name: str = "what arrived") -> Any:
    """The value of a payload, in memory of its own: arrays are writable if the sender's were.

    Args:
        payload: what `pack` made of it.
        name: of the value, for people.

    Raises:
        PayloadError: the value cannot be unpickled in this process, or lent segments cannot be read any more.
    """
    head = payload[0]
    buffers: list[bytes | bytearray] = []
    pickled = head.fetch() if isinstance(head, Outgoing | Incoming) else head
    if len(payload) > 1:
        buffers = [
            segment.fetch() if isinstance(segment, Outgoing | Incoming) else _own(segment) for segment in payload[1:]
        ]
    try:
        return pickle.loads(pickled, buffers=buffers)
    except BaseException as error:  # unpickling may run user code, which may also exit
        if is_interrupt(error):
            raise
        hint = "; it has to be importable in this process, too" if isinstance(error, ImportError) else ""
        raise PayloadError(f"cannot unpickle {name}: {summarize(error)}{hint}") from error


def _own(segment: bytes | bytearray | memoryview) -> bytes | bytearray:
    return bytes(segment) if type(segment) is Whole else bytearray(segment)


def in_full(payload: Payload) -> Payload:
    """A payload with its large segments in it instead of lent: for a receiver that cannot read this host's memory."""
    return tuple(map(_taken_along, payload)) if any(isinstance(part, Outgoing) for part in payload) else payload


def _taken_along(segment: Any) -> Any:
    if not isinstance(segment, Outgoing):
        return segment
    content = segment.fetch()
    return Whole(content) if isinstance(content, bytes) else content


def _can_pickle(value: object) -> bool:
    try:
        _Pickler(io.BytesIO(), protocol=5, buffer_callback=lambda buffer: False).dump(value)
    except BaseException as error:  # __reduce__ belongs to a user
        if is_interrupt(error):
            raise
        return False
    return True


def _culprit(value: object, name: str | tuple[str, ...]) -> str:
    try:
        where, part = find_culprit(value, name, _can_pickle)
    except Exception:  # noqa: BLE001  (attributes and lengths belong to a user, too)
        where, part = "the value", value
    return f"{where}, of type {type(part).__qualname__}"


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    """What `cloudpickle` returns, with the file name, which 3.1.3 leaves out: tracebacks and stacks show it."""
    make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    is_left_out = [isinstance(argument, str) and argument == _NO_FILE for argument in arguments]
    named = zip(arguments, is_left_out, strict=True)
    return make, tuple(code.co_filename if left_out else argument for argument, left_out in named)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is not typed
    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({types.CodeType: _reduce_code})

    def reducer_override(self, obj: Any) -> Any:
        """What `cloudpickle` returns, but faster in clear cases: this is called for every object and for its class."""
        if not isinstance(obj, _NAMED):
            return NotImplemented
        name = obj.__module__
        if name not in _examined:
            _examine(name)
        # Registered modules may be packages that contain others: cloudpickle handles that.
        if name not in _found or cloudpickle.list_registry_pickle_by_value():
            return super().reducer_override(obj)
        is_there = getattr(sys.modules.get(name), "__dict__", {}).get(obj.__qualname__) is obj
        return NotImplemented if is_there else super().reducer_override(obj)


def _examine(name: str | None) -> None:
    """Register the module to travel by value if another process would not find it."""
    module = sys.modules.get(name or "")
    if name is None or module is None:
        return
    _examined.add(name)
    if _importable(module):
        _found.add(name)
    else:
        cloudpickle.register_pickle_by_value(module)


def _importable(module: types.ModuleType) -> bool:
    """Whether the import system would find this same module if it were not imported already."""
    parts = module.__name__.split(".")
    path = None
    spec = None
    for depth in range(1, len(parts) + 1):
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        name = ".".join(parts[:depth])
        spec = next((found for find in finders if find and (found := find(name, path, None))), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    file = getattr(module, "__file__", None)
    if file is None or spec is None or not spec.has_location or spec.origin is None:
        return True
    return bool(os.path.realpath(file) == os.path.realpath(spec.origin))


_DEPTH = 16
_BREADTH = 10_000
"""The most parts of one container that are tried."""
_PATIENCE_S = 1.0
"""The search ends after this time, with what it has found."""
_MOST_KEY = 60


def find_culprit(
    value: object, name: str | tuple[str, ...], can_pickle: Callable[[object], bool]
) -> tuple[str, object]:
    """The innermost part of a value that cannot be pickled, and its path, such as ``args[1]['lock']``.

    ``name``: of the value, for people, or of each element of a tuple; ``can_pickle`` tries one value.
    """
    deadline = time.monotonic() + _PATIENCE_S
    if isinstance(name, tuple):
        named = zip(name, value, strict=False) if isinstance(value, tuple) else iter(())
        where, part = _first(named, can_pickle, deadline) or ("the value", value)
    else:
        where, part = name, value
    for _ in range(_DEPTH):
        inner = _first(itertools.islice(_parts(where, part), _BREADTH), can_pickle, deadline)
        if inner is None:
            break
        where, part = inner
    return where, part


def _first(
    parts: Iterator[tuple[str, object]], can_pickle: Callable[[object], bool], deadline: float
) -> tuple[str, object] | None:
    for where, part in parts:
        if time.monotonic() > deadline:
            return None
        if not can_pickle(part):
            return where, part
    return None


def _parts(where: str, value: object) -> Iterator[tuple[str, object]]:
    """The parts of a value that pickle would look at one by one, each with its path."""
    kind = type(value)
    if isinstance(value, dict) and kind is dict:
        for key, part in value.items():
            shown = repr(key)[:_MOST_KEY] if type(key) in (str, int, bool, float) else f"<{type(key).__qualname__}>"
            yield f"{where}[{shown}]", part
            yield f"a key of {where}", key
    elif isinstance(value, list | tuple) and kind in (list, tuple):
        for index, part in enumerate(value):
            yield f"{where}[{index}]", part
    elif isinstance(value, set | frozenset) and kind in (set, frozenset):
        for part in value:
            yield f"an element of {where}", part
    elif isinstance(value, types.FunctionType):
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f"the variable {variable!r} that {where} uses", cell.cell_contents
            except ValueError:  # the cell is not set yet
                continue
    elif kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict and not isinstance(value, type):
            for attribute, part in attributes.items():
                yield f"{where}.{attribute}", part
