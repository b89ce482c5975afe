"""A callback before the memory of an array is freed.

The callback of a weak reference to the array comes too late: from NumPy 2.5 on an array frees its memory before that.
Every release of NumPy drops the base of an array first. So an array that owns its memory gets a base, to which nothing
else refers; if an array is a view of memory of another object, that object is kept until the callback has returned.
"""

import contextlib
import ctypes
import importlib
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

_SET_BASE_OBJECT = 282  # numpy/_core/code_generators/numpy_api.py: PyArray_SetBaseObject, the same in 1.x and 2.x


class ArrayEnd:
    """The base of an array that owns its memory; it ends just before that memory does."""

    __slots__ = ("__weakref__",)


def call_before_end(anchor: object, callback: Callable[..., object], *args: object) -> "weakref.finalize[Any, Any]":
    """Call back when `anchor` ends, while its memory still exists. Not when Python exits.

    Args:
        anchor: Any object that can be weakly referenced. For arrays, the memory (their own or that of another object)
            is kept until then; other objects must free theirs after their weak references are called back, as those of
            Python classes do.
        callback: Called in the thread that releases the anchor, possibly by the garbage collector.
        args: Arguments of the callback, which must not refer to the anchor.

    Returns:
        A finalizer; detach it when the callback is no longer needed.
    """
    end: object = anchor
    kept: object = None
    if isinstance(anchor, np.ndarray):
        if anchor.base is None and anchor.flags.owndata:
            # NumPy refuses a second base: another thread was first. A lock would be taken by finalizers, too.
            with contextlib.suppress(ValueError):
                _set_base(anchor, ArrayEnd())
        base: object = anchor.base
        end, kept = (base, None) if isinstance(base, ArrayEnd) else (anchor, base)
    finalizer = weakref.finalize(end, _call, callback, args, kept)
    finalizer.atexit = False
    return finalizer


def _call(callback: Callable[..., object], args: tuple[object, ...], _kept: object) -> None:
    callback(*args)


def _set_base(array: object, base: object) -> None:
    set_base, add_reference = _c_functions()
    add_reference(base)  # which the array takes over
    set_base(array, base)


@cache
def _c_functions() -> tuple[Any, Any]:
    """Functions of NumPy's C API, found as its headers do, and of Python's."""
    python = ctypes.PyDLL(None)
    pointer = python.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    try:
        module = importlib.import_module("numpy._core._multiarray_umath")
    except ModuleNotFoundError:  # before 1.26.1
        module = importlib.import_module("numpy.core._multiarray_umath")
    table = pointer(module._ARRAY_API, None)
    address = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))[_SET_BASE_OBJECT]
    add_reference = python.Py_IncRef
    add_reference.restype, add_reference.argtypes = None, (ctypes.py_object,)
    return ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.py_object)(address), add_reference
