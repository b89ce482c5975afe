"""Memory for bytes that are read: objects that are not needed any more are filled again, since their pages exist.

A new object of many megabytes costs more than the copy into it: the kernel provides its pages one by one and clears
each. So the pool remembers the last few objects, and an object without other references takes the next value of its
size. An object with other references is never touched: its reference count shows them.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import cache
from operator import itemgetter
from typing import Any

HUGE_NBYTES = 4 << 20
"""From this size on, memory is requested in huge pages."""

KEPT_NBYTES = 256 << 20
"""The most bytes that the pool remembers, in use or not."""

KEPT_S = 5.0
"""Objects that have not been filled for this long are forgotten."""

_Kept = tuple[float, bytes | bytearray]
"""An object, and when it was last filled."""

_OBJECT = itemgetter(1)


def _references(kept: Iterable[_Kept]) -> Iterator[int]:
    """How many references each object has.

    Only C code counts here: whether an argument variable has a reference of its own depends on the interpreter. From
    3.14 on it has none, and a count that allows for one would take an object in use for an unused one.
    """
    return map(sys.getrefcount, map(_OBJECT, kept))


_UNNEEDED = next(_references([(0.0, bytearray(1))]))
"""The references to an object that only the pool and the counting refer to."""


class BufferPool:
    """The objects that this process filled last, for reuse. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[_Kept] = []
        self._timer: threading.Timer | None = None

    def allocate(self, nbytes: int, *, is_bytes: bool) -> tuple[bytes | bytearray, memoryview]:
        """An object of that size with undefined content, and its memory: fill that before the object is shared."""
        value = self._take(nbytes, bytes if is_bytes else bytearray)
        if value is None:
            value, memory = _make(nbytes, is_bytes=is_bytes)
        else:
            memory, address = _memory_of(value)
            _renew(value, address)
        self._keep(value)
        return value, memory

    def _take(self, nbytes: int, kind: type) -> bytes | bytearray | None:
        with self._lock:
            for index, references in enumerate(_references(self._kept)):
                if references == _UNNEEDED:
                    _, value = self._kept[index]
                    if len(value) == nbytes and type(value) is kind:
                        del self._kept[index]
                        return value
        return None

    def _keep(self, value: bytes | bytearray) -> None:
        with self._lock:
            self._kept.append((time.monotonic(), value))
            while sum(len(kept) for _, kept in self._kept) > KEPT_NBYTES:
                del self._kept[0]
            if self._kept and self._timer is None:
                self._start_timer()

    def _start_timer(self) -> None:
        self._timer = threading.Timer(KEPT_S, self._forget_old)
        self._timer.daemon = True
        self._timer.start()

    def _forget_old(self) -> None:
        limit = time.monotonic() - KEPT_S
        with self._lock:
            self._timer = None
            self._kept = [(when, value) for when, value in self._kept if when > limit]
            if self._kept:
                self._start_timer()


def _make(nbytes: int, *, is_bytes: bool) -> tuple[bytes | bytearray, memoryview]:
    """A new object.

    The C API documents this for objects without content. Python's own constructors would write every byte, and so touch
    every page, once more.
    """
    make, _, advise = _c_functions(is_bytes)
    value: bytes | bytearray = make(None, nbytes)
    memory, address = _memory_of(value)
    if nbytes >= HUGE_NBYTES:
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(begin, end - begin, mmap.MADV_HUGEPAGE)  # the system may ignore it
    return value, memory


def _memory_of(value: bytes | bytearray) -> tuple[memoryview, int]:
    """The memory of an object's content, which keeps the object alive, and its address."""
    _, find, _ = _c_functions(isinstance(value, bytes))
    address: int = find(value)
    array: Any = (ctypes.c_char * len(value)).from_address(address)
    array.owner = value
    return memoryview(array).cast("B"), address


def _renew(value: bytes | bytearray, address: int) -> None:
    """Reset the hash of a ``bytes`` object's old content: the field before the content, -1 if unknown."""
    if isinstance(value, bytes):
        ctypes.c_ssize_t.from_address(address - ctypes.sizeof(ctypes.c_ssize_t)).value = -1


@cache
def _c_functions(is_bytes: bool) -> tuple[Any, Any, Any]:
    """C functions to make an object without content, find its content, and advise the system about memory."""
    python, libc = ctypes.PyDLL(None), ctypes.CDLL(None)
    make = python.PyBytes_FromStringAndSize if is_bytes else python.PyByteArray_FromStringAndSize
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
    find = python.PyBytes_AsString if is_bytes else python.PyByteArray_AsString
    find.restype, find.argtypes = ctypes.c_void_p, (ctypes.py_object,)
    advise = libc.madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return make, find, advise
