"""Work that makes many objects, all of which stay."""

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
    """Without the cyclic garbage collector, which would look at all that has been made again and again, for nothing.

    What is made within such a block is all of the youngest generation: the collector rests until the last block of all
    threads has ended.
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
