"""Transfers that go on until a fault ends them, and what brings the fault about in the meantime."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from skipper.dataplane import RDMABuffer

PATIENCE_S = 20.0


def read_until_it_fails(buffer: RDMABuffer, into: Any, value: int, moving: threading.Event | None = None) -> NoReturn:
    """Every read that succeeds must have brought `value` everywhere."""
    while True:
        into[:] = 0
        operation = buffer.read_into(into, timeout=PATIENCE_S)
        if moving is not None:
            moving.set()
        operation.get()
        assert (into == value).all()


def write_until_it_fails(buffer: RDMABuffer, source: Any, moving: threading.Event | None = None) -> NoReturn:
    while True:
        operation = buffer.write_from(source, timeout=PATIENCE_S)
        if moving is not None:
            moving.set()
        operation.get()


@contextmanager
def meanwhile(action: Callable[[], object]) -> Iterator[None]:
    """Run `action` in a thread of its own, which has ended when the block has."""
    thread = threading.Thread(target=action)
    thread.start()
    try:
        yield
    finally:
        thread.join()
