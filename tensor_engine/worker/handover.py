"""How tensors pass between threads of a process: between streams of a worker, and from a worker to an actor."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future as Promise
from concurrent.futures import InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import torch

from skipper.control import ActorMesh, Channel, ControlError, Future, PortReceiver, context
from skipper.tensor_engine.errors import EngineClosedError
from skipper.tensor_engine.shared.remote_functions import Task, unpack
from skipper.tensor_engine.worker.calls import FunctionCall
from skipper.tensor_engine.worker.device import adopt, follow, mark, move_to
from skipper.tensor_engine.worker.heap import Poison, poison_storage
from skipper.tensor_engine.worker.interpreter import Interpreter
from skipper.tensor_engine.worker.process_groups import WorkerGroups
from skipper.tensor_engine.worker.user_code import use

PointKey = tuple[int, int]
"""A session, and a number that is unique in the script."""


@dataclass(slots=True)
class _RendezvousPoint:
    """Where two threads meet.

    Attributes:
        given: the value of the first one.
        returned: the second one's result for it, or its error.
    """

    given: Promise[Any] = field(default_factory=Promise)
    returned: Promise[Any] = field(default_factory=Promise)


_points: dict[PointKey, _RendezvousPoint] = {}
_ended: set[int] = set()
_lock = threading.Lock()


def _point_of(key: PointKey) -> _RendezvousPoint:
    """The rendezvous point with this key. The first thread that needs it makes it.

    Raises:
        EngineClosedError: the session has ended.
    """
    with _lock:
        if key[0] in _ended:
            raise EngineClosedError("the tensor engine has been shut down")
        return _points.setdefault(key, _RendezvousPoint())


def _forget(key: PointKey) -> None:
    """Forget the rendezvous point: the last thread that needs it calls this."""
    with _lock:
        _points.pop(key, None)


def _settle(point: _RendezvousPoint, result: Any) -> None:
    """Return a result at a rendezvous point."""
    with contextlib.suppress(InvalidStateError):  # the worker has given up
        point.returned.set_result(result)


def _fail(point: _RendezvousPoint, error: BaseException) -> None:
    """Return an error at a rendezvous point."""
    with contextlib.suppress(InvalidStateError):  # the result came first
        point.returned.set_exception(error)


def end_session(session: int) -> None:
    """End a session: threads that wait for a value get `EngineClosedError`."""
    with _lock:
        _ended.add(session)
        left = [_points.pop(key) for key in list(_points) if key[0] == session]
    for point in left:
        if not point.given.done():
            point.given.set_exception(EngineClosedError("the tensor engine has been shut down"))


def lend(worker: Interpreter, call: FunctionCall, inputs: Sequence[Any], constant: int) -> list[Any]:
    """On the owner's stream: all earlier work has been issued, so the borrower may begin."""
    _point_of(_key_of(worker, constant)).given.set_result((inputs[0], _event(inputs[0])))
    return []


def take(worker: Interpreter, call: FunctionCall, inputs: Sequence[Any], constant: int) -> list[Any]:
    """On the borrower's stream: wait until the owner has lent the tensor, and take it."""
    value, event = _point_of(_key_of(worker, constant)).given.result()
    follow(event)
    return [value.detach() if isinstance(value, torch.Tensor) else value]


def give_back(worker: Interpreter, call: FunctionCall, inputs: Sequence[Any], constant: int) -> list[Any]:
    """On the borrower's stream: no later instruction uses the tensor."""
    value = inputs[0]
    _point_of(_key_of(worker, constant)).returned.set_result((value if type(value) is Poison else None, _event(value)))
    return []


def get_back(worker: Interpreter, call: FunctionCall, inputs: Sequence[Any], constant: int) -> list[Any]:
    """On the owner's stream: wait for the borrower to be done. Until then the rendezvous point holds the memory.

    If the borrower has failed to change the tensor, it is poisoned here, with everything that shares its memory: in a
    replay the borrower does not know the owner's numbers for it.
    """
    key = _key_of(worker, constant)
    poison, event = _point_of(key).returned.result()
    follow(event)
    _forget(key)
    if poison is not None and call.writes and isinstance(inputs[0], torch.Tensor):
        poison_storage(worker.heap, inputs[0], poison)
    return []


def _key_of(worker: Interpreter, borrow: int) -> PointKey:
    """The rendezvous point of a borrow."""
    return worker.session, worker.first_borrow + borrow


def _event(value: Any) -> torch.cuda.Event | None:
    return mark() if isinstance(value, torch.Tensor) and value.is_cuda else None


@dataclass(frozen=True, slots=True)
class EndpointTask:
    """A call of an endpoint, described for workers.

    Attributes:
        actors: the actors with the method.
        task: how the result is used.
        processes: the ids of their processes: the actors of two references are equal, but may differ in these.
    """

    actors: ActorMesh[Any]
    task: Task
    processes: tuple[str, ...]


def call(worker: Interpreter, told: FunctionCall, inputs: Sequence[Any], constant: int) -> list[Any]:
    """Pass the inputs to the actor of this process and wait for its method's result."""
    order: EndpointTask = told.static
    key = (worker.session, constant)
    point = _point_of(key)
    poison = next((value for value in inputs if isinstance(value, Poison)), None)
    if poison is not None:
        point.given.set_result(poison)
        return [poison] * len(told.outputs)
    groups = WorkerGroups.of(worker)
    watch = _Watch.of(worker, order.actors)
    watch.expect(point)
    here = mark()

    def fill_in(data: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        move_to(here)
        return unpack(data, inputs, groups.get)

    point.given.set_result(fill_in)
    try:
        result, there = point.returned.result()
    finally:
        _forget(key)
        watch.forget(point)
    follow(there)
    adopt(result)
    return use(order.task, told.outputs, result, inputs)


def in_actor(method: Callable[..., Any], key: PointKey, data: bytes) -> None:
    """In place of an endpoint: call its method when the worker passes the tensors, and pass the result back."""
    point = _point_of(key)
    fill_in = point.given.result()
    if isinstance(fill_in, Poison):
        _forget(key)
        return
    with _answering(point) as give:
        args, kwargs = fill_in(data)
        give(method(*args, **kwargs))


async def in_async_actor(method: Callable[..., Awaitable[Any]], key: PointKey, data: bytes) -> None:
    """`in_actor` for an ``async`` endpoint."""
    point = _point_of(key)
    fill_in = await asyncio.wrap_future(point.given)
    if isinstance(fill_in, Poison):
        _forget(key)
        return
    with _answering(point) as give:
        args, kwargs = fill_in(data)
        give(await method(*args, **kwargs))


def as_plain(method: Callable[..., Any], key: PointKey, data: bytes) -> Any:
    """In place of an endpoint of an ordinary call: the caller gets the result, and then the worker continues."""
    with arguments(key, data) as (args, kwargs):
        return method(*args, **kwargs)


async def as_plain_async(method: Callable[..., Awaitable[Any]], key: PointKey, data: bytes) -> Any:
    """`as_plain` for an ``async`` endpoint."""
    given = asyncio.wrap_future(_point_of(key).given)
    await asyncio.wait((given,))
    given.exception()  # seen: `arguments` raises it
    with arguments(key, data) as (args, kwargs):
        return await method(*args, **kwargs)


@contextlib.contextmanager
def arguments(key: PointKey, data: bytes) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Wait until the worker passes its tensors, and yield the arguments; the worker continues when the block ends.

    Raises:
        PoisonedError: one of them could not be made.
        EngineClosedError: the engine has been shut down.
    """
    point = _point_of(key)
    fill_in = point.given.result()
    if isinstance(fill_in, Poison):
        _forget(key)
        raise PoisonedError(f"an argument could not be made: {fill_in.operation} failed: {fill_in.summary}")
    try:
        yield fill_in(data)
    finally:
        _settle(point, (None, mark()))


@contextlib.contextmanager
def _answering(point: _RendezvousPoint) -> Iterator[Callable[[Any], None]]:
    """Tell the waiting worker how a method ends. The caller passes the result to the yielded function."""
    try:
        yield lambda result: _settle(point, (result, mark()))
    except Exception as error:  # noqa: BLE001  (what it raises becomes its result's poison)
        _fail(point, error)
    except BaseException as error:
        _fail(point, ActorGoneError(f"the method has ended with {type(error).__name__}: {error}"))
        raise


class PoisonedError(RuntimeError):
    """A tensor among the arguments of an endpoint could not be made, since an earlier operation failed."""


class ActorGoneError(RuntimeError):
    """The actor whose endpoint was to be called is gone."""


class _Watch:
    """Fails the calls that wait for the actor of this process when the actor ends."""

    def __init__(self, actors: ActorMesh[Any]) -> None:
        here = context().actor_instance.proc_id
        index = next(index for index, member in enumerate(actors.members) if member.id == here)
        self._name = actors.name
        self._error: Exception | None = None
        self._expected: _RendezvousPoint | None = None
        self._guard = threading.Lock()
        port, receiver = Channel[None].open()
        self._receiver: PortReceiver[None] = receiver
        port.link(actors.slice(**actors.extent.point(index)))
        self._end: Future[None] = receiver.recv()
        self._end.add_done_callback(self._ended)

    @staticmethod
    def of(worker: Interpreter, actors: ActorMesh[Any]) -> _Watch:
        """The watch of an actor."""
        key = f"actor {actors.uid}"
        watch: _Watch | None = worker.own.get(key)
        if watch is None:
            watch = worker.own[key] = _Watch(actors)
        return watch

    def expect(self, point: _RendezvousPoint) -> None:
        """Fail this call if the actor ends, or has ended."""
        with self._guard:
            self._expected = point
        if self._error is not None:
            _fail(point, self._error)

    def forget(self, point: _RendezvousPoint) -> None:
        """Release a call that has ended, and the tensors that it got."""
        with self._guard:
            if self._expected is point:
                self._expected = None

    def close(self) -> None:
        """Stop watching."""
        self._receiver.close()

    def _ended(self, done: Future[None]) -> None:
        try:
            done.get(0)
        except ControlError as error:
            with self._guard:
                self._error = ActorGoneError(f"actor {self._name!r} of this process has ended: {error}")
                expected = self._expected
            if expected is not None:
                _fail(expected, self._error)
