"""The cyclic garbage collector, switched off while many objects are created that all stay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0  # how many blocks there are at the moment, of all threads
_was_enabled = False


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch the collector off: it would scan the new objects again and again, and free none.

    The collector runs again when the last such block of all threads has ended.
    """
    global _inside, _was_enabled
    with _lock:
        if not _inside:
            _was_enabled = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _was_enabled:
                gc.enable()
