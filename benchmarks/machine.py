"""What benchmarks ask of the machine itself: how much memory is free, and the C library's memcpy as a yardstick."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import cast

from skipper.benchmarks.errors import BenchmarkError

__all__ = ["available_nbytes", "memcpy", "proc_nbytes"]


def available_nbytes() -> int:
    """How much memory this machine could still give out (``MemAvailable`` of proc(5))."""
    return proc_nbytes("/proc/meminfo", "MemAvailable")


def proc_nbytes(path: str, key: str) -> int:
    """The value behind ``key`` in a file of proc(5) that counts in kB, in bytes.

    Raises:
        BenchmarkError: The file does not have the key.
    """
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) << 10
    raise BenchmarkError(f"{path} has no {key}")


def memcpy() -> Callable[[int, int, int], object]:
    """The C library's copy: takes target address, source address and bytes; ctypes releases the GIL while it runs."""
    function = ctypes.CDLL(None).memcpy
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = ctypes.c_void_p
    return cast("Callable[[int, int, int], object]", function)
