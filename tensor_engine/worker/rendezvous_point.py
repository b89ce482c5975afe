"""Where threads of a process meet that work for a session: promises, under numbers that the script gives."""

from __future__ import annotations

import threading
from concurrent.futures import Future as Promise
from concurrent.futures import InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from skipper.tensor_engine.errors import EngineClosedError

PointKey = tuple[int, int]
"""A session, and a number that is unique in the script."""


@dataclass(slots=True)
class RendezvousPoint:
    """Where two threads meet.

    Attributes:
        given: what the first one brings.
        returned: what the second one makes of it, or raises.
    """

    given: Promise[Any] = field(default_factory=Promise)
    returned: Promise[Any] = field(default_factory=Promise)


_points: dict[PointKey, RendezvousPoint] = {}
_ended: set[int] = set()
_lock = threading.Lock()


def point_of(key: PointKey) -> RendezvousPoint:
    """The rendezvous point of this number; whoever comes first makes it.

    Raises:
        EngineClosedError: the session has ended.
    """
    with _lock:
        if key[0] in _ended:
            raise EngineClosedError("the tensor engine has been shut down")
        return _points.setdefault(key, RendezvousPoint())


def forget(key: PointKey) -> None:
    """Forget the rendezvous point: the last one to leave calls this."""
    with _lock:
        _points.pop(key, None)


def settle(point: RendezvousPoint, result: Any) -> None:
    """Return a result at a rendezvous point."""
    try:
        point.returned.set_result(result)
    except InvalidStateError:
        return  # the worker has given up


def fail(point: RendezvousPoint, error: BaseException) -> None:
    """Return an error at a rendezvous point."""
    try:
        point.returned.set_exception(error)
    except InvalidStateError:
        return  # the result was first


def end(session: int) -> None:
    """End a session: whoever waits for something to be given gets `EngineClosedError`."""
    with _lock:
        _ended.add(session)
        left = [_points.pop(key) for key in list(_points) if key[0] == session]
    for point in left:
        if not point.given.done():
            point.given.set_exception(EngineClosedError("the tensor engine has been shut down"))
