"""Values to payloads and back: cloudpickle, protocol 5, large buffers out of band.

Classes and functions of the script's ``__main__``, and of modules that a child process could not import (a test file
that pytest loaded by path), travel by value; everything else by reference. Payloads are unpacked only after the link
that brought them has been authenticated.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import types
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from control.errors import PayloadError
from control.wire.envelope import Payload

OUT_OF_BAND_NBYTES = 16 << 10
"""Buffers from this size on travel beside the pickle instead of within it."""

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
"""Types that the C pickler handles alone, whatever their values."""

_examined: set[str] = {"__main__", "builtins"}


def pack(value: object) -> Payload:
    """A payload that holds its own copy of ``value``, which may be changed afterwards.

    Raises:
        PayloadError: the value cannot be pickled.
    """
    if type(value) in _PLAIN:
        return (pickle.dumps(value, protocol=5),)
    buffers: list[bytearray] = []

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        with buffer.raw() as raw:
            if raw.nbytes < OUT_OF_BAND_NBYTES:
                return True
            buffers.append(bytearray(raw))
        return False

    sink = io.BytesIO()
    try:
        _Pickler(sink, protocol=5, buffer_callback=in_band).dump(value)
    except Exception as error:
        raise PayloadError(f"cannot pickle a value of type {type(value).__qualname__}: {error}") from error
    return (sink.getvalue(), *buffers)


def pack_arguments(args: tuple[object, ...], kwargs: dict[str, object]) -> Payload:
    """`pack((args, kwargs))`, by a shorter way for plain arguments.

    Raises:
        PayloadError: an argument cannot be pickled.
    """
    if _PLAIN.issuperset(map(type, args)) and (not kwargs or _PLAIN.issuperset(map(type, kwargs.values()))):
        return (pickle.dumps((args, kwargs), protocol=5),)
    return pack((args, kwargs))


def unpack(payload: Payload) -> Any:
    """The value of a payload, in memory of its own: arrays are writable where the sender's were.

    Raises:
        PayloadError: the value cannot be unpickled in this process.
    """
    try:
        if len(payload) == 1:
            return pickle.loads(payload[0])
        return pickle.loads(payload[0], buffers=[bytearray(buffer) for buffer in payload[1:]])
    except Exception as error:
        raise PayloadError(f"cannot unpickle what arrived: {type(error).__name__}: {error}") from error


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is not typed
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType) and obj.__module__ not in _examined:
            _examine(obj.__module__)
        return super().reducer_override(obj)


def _examine(name: str | None) -> None:
    """Register the module to travel by value if another process would not find it."""
    module = sys.modules.get(name or "")
    if name is None or module is None:
        return
    _examined.add(name)
    if not _importable(module):
        cloudpickle.register_pickle_by_value(module)


def _importable(module: types.ModuleType) -> bool:
    """Whether the import system would find this very module, had it not been imported already."""
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
