"""When the memory of an array ends: told before it is freed.

A weak reference to the array is called back too late: from NumPy 2.5 on an array frees its memory before that. Every
release lets go of the base of an array first. So an array that owns its memory gets one, to which nothing else refers.
"""

import contextlib
import ctypes
import importlib
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

_SET_BASE_OBJECT = 282  # numpy/_core/code_generators/numpy_api.py: PyArray_SetBaseObject, the same in 1.x and 2.x


class ArrayEnd:
    """The base of an array that owns its memory; it ends just before that memory does."""

    __slots__ = ("__weakref__",)


def end_of(anchor: object) -> object:
    """The object that is the first to go when `anchor` does, while the memory that it owns is still there.

    That is `anchor` itself unless it is an array with memory of its own.
    """
    if not isinstance(anchor, np.ndarray) or not anchor.flags.owndata:
        return anchor
    if anchor.base is None:
        # NumPy refuses a second base: another thread was first. A lock would be taken by finalizers, too.
        with contextlib.suppress(ValueError):
            _set_base(anchor, ArrayEnd())
    return anchor.base if isinstance(anchor.base, ArrayEnd) else anchor


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
    core = "numpy._core" if find_spec("numpy._core._multiarray_umath") else "numpy.core"  # the latter before 2.0
    table = pointer(importlib.import_module(f"{core}._multiarray_umath")._ARRAY_API, None)
    address = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))[_SET_BASE_OBJECT]
    add_reference = python.Py_IncRef
    add_reference.restype, add_reference.argtypes = None, (ctypes.py_object,)
    return ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.py_object)(address), add_reference
