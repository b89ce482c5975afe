"""When the memory of an array ends: told before it is freed.

A weak reference to the array is called back too late: from NumPy 2.5 on an array frees its memory before that. Every
release lets go of the base of an array first. So an array that owns its memory gets one, to which nothing else refers;
where an array lies over memory of another object, that object is kept until the callback has returned.
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
    """Call back when `anchor` ends, while the memory that it stands for is still there. Not when Python exits.

    Args:
        anchor: Any object that can be weakly referenced. The memory of an array, its own or that of another object, is
            looked after; other objects must free theirs after their weak references are called back, as those of
            Python classes do.
        callback: From whatever thread lets go of the anchor, perhaps out of the garbage collector.
        args: Must not refer to the anchor.

    Returns:
        To be detached when there is nothing left to be told.
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
    """Of NumPy's C API, as its headers find it, and of Python's."""
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
