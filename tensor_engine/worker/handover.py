"""How a worker hands tensors to an actor of its process, which calls its method with them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from skipper.control import ActorMesh, Channel, ControlError, Future, PortReceiver, context
from skipper.tensor_engine.shared.remote_functions import Task, unpack
from skipper.tensor_engine.worker.calls import FunctionCall
from skipper.tensor_engine.worker.device import adopt, follow, mark, move_to
from skipper.tensor_engine.worker.heap import Poison
from skipper.tensor_engine.worker.interpreter import Interpreter
from skipper.tensor_engine.worker.process_groups import WorkerGroups
from skipper.tensor_engine.worker.rendezvous_point import PointKey, RendezvousPoint, fail, forget, point_of, settle
from skipper.tensor_engine.worker.user_code import use


@dataclass(frozen=True, slots=True)
class EndpointTask:
    """What a worker is told of calls of an endpoint.

    Attributes:
        actors: whose method it is.
        task: what becomes of the result.
    """

    actors: ActorMesh[Any]
    task: Task


def call(worker: Interpreter, told: FunctionCall, inputs: Sequence[Any], constant: int) -> list[Any]:
    """Give the inputs to the actor of this process and wait for what its method makes of them."""
    order: EndpointTask = told.static
    key = (worker.session, constant)
    point = point_of(key)
    poison = next((value for value in inputs if isinstance(value, Poison)), None)
    if poison is not None:
        point.given.set_result(poison)
        return [poison] * len(told.outputs)
    groups = WorkerGroups.of(worker)
    _Watch.of(worker, order.actors).expect(point)
    here = mark()

    def fill_in(data: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        move_to(here)
        return unpack(data, inputs, groups.get)

    point.given.set_result(fill_in)
    try:
        result, there = point.returned.result()
    finally:
        forget(key)
    follow(there)
    adopt(result)
    return use(order.task, told.outputs, result, inputs)


def in_actor(method: Callable[..., Any], key: PointKey, data: bytes) -> None:
    """In place of an endpoint: call its method when the worker gives the tensors, and give the result to the worker."""
    point = point_of(key)
    fill_in = point.given.result()
    if isinstance(fill_in, Poison):
        forget(key)
        return
    with _answering(point) as give:
        args, kwargs = fill_in(data)
        give(method(*args, **kwargs))


async def in_async_actor(method: Callable[..., Awaitable[Any]], key: PointKey, data: bytes) -> None:
    """`in_actor` for an ``async`` endpoint."""
    point = point_of(key)
    fill_in = await asyncio.wrap_future(point.given)
    if isinstance(fill_in, Poison):
        forget(key)
        return
    with _answering(point) as give:
        args, kwargs = fill_in(data)
        give(await method(*args, **kwargs))


def as_plain(method: Callable[..., Any], key: PointKey, data: bytes) -> Any:
    """In place of an endpoint that is called plainly: the caller gets what it returns, and the worker goes on then."""
    with arguments(key, data) as (args, kwargs):
        return method(*args, **kwargs)


async def as_plain_async(method: Callable[..., Awaitable[Any]], key: PointKey, data: bytes) -> Any:
    """`as_plain` for an ``async`` endpoint."""
    given = asyncio.wrap_future(point_of(key).given)
    await asyncio.wait((given,))
    given.exception()  # seen: `arguments` raises it
    with arguments(key, data) as (args, kwargs):
        return await method(*args, **kwargs)


@contextlib.contextmanager
def arguments(key: PointKey, data: bytes) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Wait for the worker to be as far, and give the arguments with its tensors; it goes on when this is left.

    Raises:
        PoisonedError: one of them could not be made.
        EngineClosedError: the engine has been shut down.
    """
    point = point_of(key)
    fill_in = point.given.result()
    if isinstance(fill_in, Poison):
        forget(key)
        raise PoisonedError(f"an argument could not be made: {fill_in.operation} failed: {fill_in.summary}")
    try:
        yield fill_in(data)
    finally:
        settle(point, (None, mark()))


@contextlib.contextmanager
def _answering(point: RendezvousPoint) -> Iterator[Callable[[Any], None]]:
    """Tell the waiting worker how a method ends. The caller gives what it returns to the function that this yields."""
    try:
        yield lambda result: settle(point, (result, mark()))
    except Exception as error:  # noqa: BLE001  (whatever it raises is its result's poison)
        fail(point, error)
    except BaseException as error:
        fail(point, ActorGoneError(f"the method has ended with {type(error).__name__}: {error}"))
        raise


class PoisonedError(RuntimeError):
    """A tensor among the arguments of an endpoint could not be made, since an operation before has failed."""


class ActorGoneError(RuntimeError):
    """The actor whose endpoint was to be called is gone."""


class _Watch:
    """Fails the calls that wait for the actor of this process when the actor ends."""

    def __init__(self, actors: ActorMesh[Any]) -> None:
        here = context().actor_instance.proc_id
        index = next(index for index, member in enumerate(actors.members) if member.id == here)
        self._name = actors.name
        self._error: Exception | None = None
        self._expected: RendezvousPoint | None = None
        self._guard = threading.Lock()
        port, receiver = Channel[None].open()
        self._receiver: PortReceiver[None] = receiver
        port.link(actors.slice(**actors.extent.point(index)))
        self._end: Future[None] = receiver.recv()
        self._end.add_done_callback(self._ended)

    @staticmethod
    def of(worker: Interpreter, actors: ActorMesh[Any]) -> _Watch:
        """The one for an actor."""
        key = f"actor {actors.uid}"
        watch: _Watch | None = worker.own.get(key)
        if watch is None:
            watch = worker.own[key] = _Watch(actors)
        return watch

    def expect(self, point: RendezvousPoint) -> None:
        """Fail this call if the actor ends, or has ended."""
        with self._guard:
            self._expected = point
        if self._error is not None:
            fail(point, self._error)

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
                fail(expected, self._error)
