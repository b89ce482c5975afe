"""The ports of a process: numbered places where replies arrive, what handles them, and why a reply is missing."""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from skipper.control.model.errors import ControlError, LinkError, SupervisionError
from skipper.control.model.failure import FailureKind, MeshFailure
from skipper.control.model.future import Future, Pending, Promise, peek, raising
from skipper.control.model.shape import Extent
from skipper.control.model.value_mesh import ValueMesh
from skipper.control.runtime import running
from skipper.control.runtime.interfaces import Caller, LocalActor, OwedReply, Ports, ReplyHandler
from skipper.control.runtime.messages import ActorRef, Loss
from skipper.control.runtime.replies import open_reply
from skipper.control.runtime.requests import ACTIVITY, WATCH, AnyRequest
from skipper.control.runtime.running import RunningProcess
from skipper.control.wire.messages import NOTICE, Kind, Payload
from skipper.control.wire.payload import unpack
from skipper.control.wire.process_ref import ProcessRef

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Awaited:
    """The sender of an awaited answer.

    Attributes:
        process: where it should come from.
        who: the sender, for people.
        endpoint: the name of the endpoint that was called, or of the request to a process.
        actor: the actor that was called, or that the request is about, if any.
        request: the request; None if it is an endpoint.
    """

    process: ProcessRef
    who: str
    endpoint: str
    actor: ActorRef | None = None
    request: AnyRequest | None = None

    @property
    def process_id(self) -> str:
        """The id of the process that the answer should come from."""
        return self.process.id

    def not_done(self) -> str:
        """What has not happened while there is no answer."""
        if self.request is None:
            return f"{self.who} has not answered {self.endpoint}"
        return f"{self.who} {self.request.not_done or 'has not done what it was asked to'}"

    def ids(self) -> tuple[str, ...]:
        """The ids of the process and of the actor."""
        return (self.process_id,) if self.actor is None else (self.process_id, self.actor.actor_id)

    def is_one_of(self, ids: Collection[str]) -> bool:
        """Whether one of these ids of actors or processes is this sender's."""
        return self.process_id in ids or (self.actor is not None and self.actor.actor_id in ids)

    def error(self, loss: Loss) -> SupervisionError:
        """The error that a caller gets when this answer will never come."""
        if self.actor is not None:
            failure = self.actor.death(loss)
        elif loss.kind is not None:
            failure = MeshFailure(self.who, self.process_id, None, loss.kind, loss.reason, source=loss.process_id)
        else:
            failure = None
        if self.request is not None:
            what = f"{self.not_done()}: " if self.request.not_done else ""
            return SupervisionError(f"{what}{loss.reason}", failure)
        return SupervisionError(f"{self.who} cannot answer {self.endpoint}: {loss.reason}", failure)


class PortTable:
    """The open ports of a process; safe to use from any thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, ReplyHandler] = {}
        self._owed: dict[int, OwedReply] = {}
        """Ports of answers to requests; there may be several for each process of a job."""
        self._owed_by: dict[str, set[int]] = {}
        """Their numbers, by the ids of the processes and actors that owe the answers."""
        self._owed_lock = threading.Lock()
        self._links: dict[int, dict[int, DeathWatch]] = {}
        self._link_lock = threading.Lock()

    def open(self, reply: ReplyHandler) -> int:
        """A new port's number; never 0."""
        number = next(self._numbers)
        self._open[number] = reply
        return number

    def open_owed(self, reply: OwedReply) -> int:
        """A new port's number, for an answer that one process owes; the loss of another costs nothing here."""
        number = next(self._numbers)
        with self._owed_lock:
            self._owed[number] = reply
            for each in reply.ids():
                self._owed_by.setdefault(each, set()).add(number)
        return number

    def reserve(self) -> int:
        """A number for `open_at`; never 0."""
        return next(self._numbers)

    def open_at(self, number: int, reply: ReplyHandler) -> None:
        """Open a port with a number of the caller's choice."""
        self._open[number] = reply

    def is_open(self, number: int) -> bool:
        """Whether an answer is still expected there."""
        return number in self._open or number in self._owed

    def close(self, number: int) -> None:
        """Forget a port; later messages for it are dropped."""
        if self._open.pop(number, None) is None and number in self._owed:
            self._close_owed(number)
        if self._links:
            self._links.pop(number, None)

    def deliver(self, number: int, rank: int, kind: Kind, payload: Payload) -> None:
        """Bring a reply to its port."""
        reply = self._open.get(number) or self._owed.get(number)
        if reply is not None and reply.deliver(rank, kind, payload):
            self.close(number)

    def link(
        self,
        number: int,
        rank: int,
        add: Iterable[ActorRef],
        remove: Iterable[ActorRef],
        caller: Caller,
    ) -> None:
        """Change what a port, or one rank of a shared port, is linked to.

        Args:
            number: of the port.
            rank: the sender's rank at the shared port.
            add: actors to link.
            remove: actors to unlink.
            caller: asks the processes of the actors.
        """
        with self._link_lock:
            reply = self._open.get(number)
            if reply is None:
                return
            of_port = self._links.setdefault(number, {})
            links = of_port.get(rank)
            if links is None:
                links = of_port[rank] = DeathWatch(caller, lambda error: self._lapse(number, rank, error))
                reply.entrust(rank)
        links.change(add, remove)

    def undelivered(self, number: int, loss: Loss) -> None:
        """Tell a `Notice` that its message was for a process that is gone."""
        notice = self._open.get(number)
        if isinstance(notice, Notice):
            notice.lost(loss)

    def owed_by(self, ids: Collection[str]) -> bool:
        """Whether an answer of one of these actors or processes is awaited."""
        if any(each in self._owed_by for each in ids):
            return True
        replies = (OneReply, _MeshReplies)
        return any(isinstance(reply, replies) and reply.is_owed_by(ids) for reply in list(self._open.values()))

    def link_error(self, number: int) -> LinkError | None:
        """What a receiver at a port gets if nothing has arrived: an error if all linked actors are dead."""
        links = self._links.get(number, {}).get(0)
        return None if links is None else links.error()

    def _lapse(self, number: int, rank: int, error: LinkError) -> None:
        reply = self._open.get(number)
        if reply is not None and reply.lapse(rank, error):
            self.close(number)

    def process_lost(self, process_id: str, loss: Loss) -> None:
        """Tell every port that nothing more will come from a process."""
        for number, reply in list(self._open.items()):
            if reply.process_lost(process_id, loss):
                self.close(number)
        for number in sorted(self._owed_by.get(process_id, ())):
            owed = self._owed.get(number)
            if owed is not None and owed.process_lost(process_id, loss):
                self.close(number)

    def _close_owed(self, number: int) -> None:
        with self._owed_lock:
            reply = self._owed.pop(number, None)
            for each in () if reply is None else reply.ids():
                numbers = self._owed_by.get(each, set())
                numbers.discard(number)
                if not numbers:
                    self._owed_by.pop(each, None)


class OneReply(Promise[T]):
    """One reply and its future in one object: each call in flight needs only this."""

    __slots__ = ("_entrusted", "_whose")

    def __init__(self, awaited: Awaited) -> None:
        self._whose = awaited
        self._entrusted = False

    @property
    def pending(self) -> Pending | None:  # type: ignore[override]  # only it says what it depends on
        """The promise itself."""
        return None if self.done() else self

    def describe(self) -> str:
        """Who has not answered."""
        return self._whose.not_done()

    def inquire(self) -> Callable[[], str]:
        """Ask the missing actor or process what it is doing."""
        return ask((self._whose,), 1)

    def deliver(self, rank: int, kind: Kind, payload: Payload) -> bool:
        """Take a reply."""
        if kind is Kind.FAILURE:
            self.fail_by(lambda: open_reply(kind, payload))
        else:
            self.settle_by(unpack, payload)
        return True

    def process_lost(self, process_id: str, loss: Loss) -> bool:
        """Give up on the replies of a process."""
        if self._entrusted or process_id != self._whose.process_id:
            return False
        self.fail_by(raising(self._whose.error(loss)))
        return True

    def entrust(self, rank: int) -> None:
        """Note that another process may send the reply."""
        self._entrusted = True

    def lapse(self, rank: int, error: LinkError) -> bool:
        """Note that no actor is left that might reply."""
        self.fail_by(raising(error))
        return True

    def ids(self) -> tuple[str, ...]:
        """The ids of the process that it should come from, and of the actor there that was called."""
        return self._whose.ids()

    def is_owed_by(self, ids: Collection[str]) -> bool:
        """Whether it should come from one of these actors or processes."""
        return self._whose.is_one_of(ids)


class _MeshReplies:
    """The replies of the members of a mesh, while some are missing."""

    __slots__ = ("_awaited", "_entrusted", "_missing", "_ranks_of")

    def __init__(self, awaited: Sequence[Awaited]) -> None:
        self._awaited = awaited
        self._missing = set(range(len(awaited)))
        self._entrusted: set[int] = set()
        self._ranks_of: dict[str, list[int]] | None = None
        """The ranks by process, once a process was lost."""

    def describe(self) -> str:
        """Who has not answered."""
        return name_all(self._not_answered(), len(self._awaited))

    def inquire(self) -> Callable[[], str]:
        """Ask the missing members what they are doing."""
        return ask(self._not_answered(), len(self._awaited))

    def entrust(self, rank: int) -> None:
        """Note that another process may send the reply of this rank."""
        self._entrusted.add(rank)

    def is_owed_by(self, ids: Collection[str]) -> bool:
        """Whether a reply should come from one of these actors or processes."""
        return any(self._awaited[rank].is_one_of(ids) for rank in list(self._missing))

    def _lost_with(self, process_id: str) -> list[int]:
        """The ranks of this process whose replies are missing, in order."""
        if self._ranks_of is None:
            ranks_of: dict[str, list[int]] = {}
            for rank, awaited in enumerate(self._awaited):
                ranks_of.setdefault(awaited.process_id, []).append(rank)
            self._ranks_of = ranks_of
        lost = self._ranks_of.get(process_id, ())
        return [rank for rank in lost if rank in self._missing and rank not in self._entrusted]

    def _not_answered(self) -> list[Awaited]:
        return [self._awaited[rank] for rank in sorted(self._missing)]


class MeshReply(_MeshReplies):
    """A reply from each member of a mesh, for one future; the first error settles it."""

    __slots__ = ("_extent", "_kind", "_payloads", "_promise")

    def __init__(
        self,
        promise: Promise[ValueMesh[Any]],
        extent: Extent,
        awaited: Sequence[Awaited],
        kind: type[ValueMesh[Any]] = ValueMesh,
    ) -> None:
        super().__init__(awaited)
        self._promise = promise
        self._kind = kind
        self._extent = extent
        self._payloads: list[Payload | None] = [None] * len(awaited)
        promise.pending = self

    def deliver(self, rank: int, kind: Kind, payload: Payload) -> bool:
        """Take a reply."""
        if kind is Kind.FAILURE:
            self._fail(lambda: open_reply(kind, payload))
            return True
        if rank in self._missing:
            self._payloads[rank] = payload
            self._missing.discard(rank)
        if self._missing:
            return False
        self._promise.settle_by(self._open_all)
        return True

    def process_lost(self, process_id: str, loss: Loss) -> bool:
        """Give up on the replies of a process."""
        for rank in self._lost_with(process_id):
            self._fail(raising(self._awaited[rank].error(loss)))
            return True
        return False

    def lapse(self, rank: int, error: LinkError) -> bool:
        """Note that no actor is left that might reply."""
        self._fail(raising(error))
        return True

    def _fail(self, open_error: Callable[[], Any]) -> None:
        """End with the first error; code that hears of it has heard of the other members' errors, too."""
        self._promise.fail_by(open_error, self._ids)

    def _ids(self) -> frozenset[str]:
        return frozenset(itertools.chain.from_iterable(awaited.ids() for awaited in self._awaited))

    def _open_all(self) -> ValueMesh[Any]:
        return self._kind(self._extent, [unpack(payload) for payload in self._payloads if payload is not None])


class ResponseStream(Generic[T_co]):
    """The results of a call to several actors, in the order in which they come.

    ``async for`` yields results; ``for`` yields futures, the n-th of which ends with the n-th result to come. An
    error is raised in place of its result, and the stream continues after it.

    Example:
        ```python
        import asyncio

        from skipper.control import Actor, current_rank, endpoint, this_host

        class Worker(Actor):
            @endpoint
            def work(self) -> int:
                return current_rank().rank

        workers = this_host().spawn_procs({"gpus": 2}).spawn("workers", Worker)
        for future in workers.work.stream():  # futures, in the order in which they end
            print(future.get())

        async def main() -> None:
            print(sorted([result async for result in workers.work.stream()]))  # [0, 1]

        asyncio.run(main())
        ```
    """

    def __init__(self, size: int) -> None:
        self._futures: list[Promise[T_co]] = [Promise() for _ in range(size)]
        self._next = 0
        self._places: dict[int, int] = {}
        """The future of each rank whose result has come."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._futures)

    def __iter__(self) -> Iterator[Future[T_co]]:
        return iter(self._futures)

    def __aiter__(self) -> AsyncIterator[T_co]:
        return self

    async def __anext__(self) -> T_co:
        if self._next == len(self._futures):
            raise StopAsyncIteration
        self._next += 1
        return await self._futures[self._next - 1]

    def await_from(self, pending: Pending) -> None:
        """Say what the results depend on, for the message of an error. For `StreamReply`, as `push` is."""
        for promise in self._futures:
            promise.pending = pending

    def push(self, rank: int, open_result: Callable[[], Any], *, is_error: bool) -> None:
        """End the next future with the result of a rank, or with an error; a rank pushed again gets the same one."""
        with self._lock:
            promise = self._futures[self._places.setdefault(rank, len(self._places))]
        (promise.fail_by if is_error else promise.settle_by)(open_result)


class StreamReply(_MeshReplies):
    """A reply from each member of a mesh, for a stream."""

    __slots__ = ("_stream",)

    def __init__(self, stream: ResponseStream[Any], awaited: Sequence[Awaited]) -> None:
        super().__init__(awaited)
        self._stream = stream
        stream.await_from(self)

    def deliver(self, rank: int, kind: Kind, payload: Payload) -> bool:
        """Take a reply."""
        self._push(rank, lambda: open_reply(kind, payload), is_error=kind is Kind.FAILURE)
        return not self._missing

    def process_lost(self, process_id: str, loss: Loss) -> bool:
        """Give up on the replies of a process."""
        for rank in self._lost_with(process_id):
            self._push(rank, raising(self._awaited[rank].error(loss)), is_error=True)
        return not self._missing

    def lapse(self, rank: int, error: LinkError) -> bool:
        """Note that no actor is left that might reply."""
        self._push(rank, raising(error), is_error=True)
        return not self._missing

    def _push(self, rank: int, open_result: Callable[[], Any], *, is_error: bool) -> None:
        """Fill this rank's place, unless it is filled."""
        if rank in self._missing:
            self._stream.push(rank, open_result, is_error=is_error)
            self._missing.discard(rank)


class Acknowledgements:
    """An acknowledgement from each of several processes; one that is gone counts as having given it."""

    def __init__(self, promise: Promise[None], process_ids: Sequence[str]) -> None:
        self._promise = promise
        self._missing = set(range(len(process_ids)))
        self._ranks_of: dict[str, list[int]] = {}
        for rank, process_id in enumerate(process_ids):
            self._ranks_of.setdefault(process_id, []).append(rank)
        self._error: Callable[[], Any] | None = None

    def deliver(self, rank: int, kind: Kind, payload: Payload) -> bool:
        """Take a reply."""
        if kind is Kind.FAILURE and self._error is None:
            self._error = lambda: open_reply(kind, payload)
        return self._acknowledged((rank,))

    def process_lost(self, process_id: str, loss: Loss) -> bool:
        """Give up on the replies of a process."""
        return self._acknowledged(self._ranks_of.get(process_id, ()))

    def entrust(self, rank: int) -> None:
        """Nothing to do: processes acknowledge, and they pass no port on."""

    def lapse(self, rank: int, error: LinkError) -> bool:
        """Nothing to do: no actor is linked to this port."""
        return False

    def _acknowledged(self, ranks: Iterable[int]) -> bool:
        self._missing.difference_update(ranks)  # in one step: answers and ends come on several threads
        if not self._missing:
            self._promise.settle_by(self._error or (lambda: None))
        return not self._missing


_numbers = itertools.count(NOTICE)


def notice_number(ports: Ports, sender: LocalActor, mesh_uid: int, mesh_name: str) -> int:
    """The value of `Call.reply_to` for broadcasts of this actor to that mesh."""
    number = sender.meshes.notices.get(mesh_uid)
    if number is None:
        number = sender.meshes.notices.setdefault(mesh_uid, next(_numbers))
        ports.open_at(number, Notice(sender, mesh_uid, mesh_name))
    return number


class Notice:
    """The port for the notice that a broadcast was not delivered: its sender fails."""

    __slots__ = ("_mesh_name", "_mesh_uid", "_sender")

    def __init__(self, sender: LocalActor, mesh_uid: int, mesh_name: str) -> None:
        self._sender = sender
        self._mesh_uid = mesh_uid
        self._mesh_name = mesh_name

    def deliver(self, rank: int, kind: Kind, payload: Payload) -> bool:
        """Take the reason why it was not delivered."""
        try:
            open_reply(kind, payload)
        except ControlError as error:
            cause = error.failure if isinstance(error, SupervisionError) else None
            self._undelivered(error, cause)
        return False

    def lost(self, loss: Loss) -> None:
        """Note that the target process of a broadcast is gone."""
        cause = None
        if loss.kind is not None:
            cause = MeshFailure(self._mesh_name, self._mesh_name, None, loss.kind, loss.reason, source=loss.process_id)
        self._undelivered(SupervisionError(loss.reason, cause), cause)

    def process_lost(self, process_id: str, loss: Loss) -> bool:
        """Nothing ends here: only the next broadcast to the process counts."""
        return False

    def entrust(self, rank: int) -> None:
        """Nothing to do: this port is never passed on."""

    def lapse(self, rank: int, error: LinkError) -> bool:
        """Nothing to do: no actor is linked to this port."""
        return False

    def _undelivered(self, error: ControlError, cause: MeshFailure | None) -> None:
        if cause is not None and self._sender.meshes.has_spawned(self._mesh_uid):
            return  # it owns the mesh and gets that failure: once is enough
        message = f"a broadcast to {self._mesh_name} was not delivered: {str(error).splitlines()[0]}"
        self._sender.fail_by_itself(FailureKind.UNDELIVERED, message, cause, error)


_MOST_ASKED = 3
"""How many of the members that have not answered are named and asked."""


def name_all(missing: Sequence[Awaited], expected: int) -> str:
    """Who has not answered, in short."""
    if not missing:
        return "all have answered"
    if expected == 1:
        return missing[0].not_done()
    some = ", ".join(awaited.who for awaited in missing[:_MOST_ASKED])
    more = f" and {len(missing) - _MOST_ASKED} more" if len(missing) > _MOST_ASKED else ""
    return f"{len(missing)} of {expected} have not answered {missing[0].endpoint}: {some}{more}"


def ask(missing: Sequence[Awaited], expected: int) -> Callable[[], str]:
    """Ask the members that have not answered what they are doing.

    Returns:
        A function for what is known when it is called: `name_all`, and the answers up to then.
    """
    if not running.is_running():
        return lambda: name_all(missing, expected)
    process = running.current()
    asked = [(awaited, _ask_one(process, awaited)) for awaited in missing[:_MOST_ASKED]]

    def known() -> str:
        found = [(awaited.who, _outcome(awaited, answer)) for awaited, answer in asked]
        doing = (said if expected == 1 else f"{who}: {said}" for who, said in found)
        return "; ".join([name_all(missing, expected), *doing])

    return known


def _ask_one(process: RunningProcess, awaited: Awaited) -> Future[str] | None:
    """A future for the answer to the question; None if the question would only wait for a connection, like the call."""
    link = process.transport.find(awaited.process_id)
    if awaited.process_id != process.me.id and not (link is not None and link.connected):
        return None
    return process.request(awaited.process, ACTIVITY, target=0 if awaited.actor is None else awaited.actor.uid)


def _outcome(awaited: Awaited, answer: Future[str] | None) -> str:
    where = f"its process ({awaited.process.name})"
    if answer is None:
        return f"{where} is not connected yet: it is being started, or cannot be reached"
    if not answer.done():
        return f"{where} does not say what it is doing: it is frozen, lacks CPU time, or holds the interpreter lock"
    try:
        return answer.get(0)
    except ControlError as error:
        return str(error)


_Key = tuple[str, int]


def watch(caller: Caller, actor: ActorRef) -> Future[MeshFailure | None]:
    """Wait for the end of an actor anywhere in the job: its failure, or None if it was stopped.

    The actor's process reports it, or the end of that process shows it: nothing is polled.
    """
    answer: OneReply[MeshFailure | None] = OneReply(
        Awaited(actor.process, str(actor), WATCH.name, actor, request=WATCH)
    )
    port = caller.ports.open_owed(answer)
    caller.send(actor.process, WATCH.message(None, target=actor.uid, port=port))
    ended: Promise[MeshFailure | None] = Promise()

    def outcome() -> MeshFailure | None:
        try:
            return peek(answer)
        except SupervisionError as error:
            return error.failure  # the actor was dead already, or its process is

    answer.add_done_callback(lambda _: ended.settle_by(outcome))
    return ended


class DeathWatch:
    """The actors that a port is linked to. Safe to use from any thread.

    Args:
        caller: asks the processes of the actors.
        on_dead: called, perhaps several times, once all of them have ended.
    """

    def __init__(self, caller: Caller, on_dead: Callable[[LinkError], object]) -> None:
        self._caller = caller
        self._on_dead = on_dead
        self._lock = threading.Lock()
        self._alive: dict[_Key, ActorRef] = {}
        self._dead: dict[_Key, tuple[ActorRef, MeshFailure | None]] = {}

    def change(self, add: Iterable[ActorRef], remove: Iterable[ActorRef]) -> None:
        """Link some actors and unlink others, as one step."""
        added: list[ActorRef] = []
        with self._lock:
            for actor in add:
                key = (actor.process.id, actor.uid)
                if key not in self._alive and key not in self._dead:
                    self._alive[key] = actor
                    added.append(actor)
            for actor in remove:
                self._alive.pop((actor.process.id, actor.uid), None)
                self._dead.pop((actor.process.id, actor.uid), None)
        for actor in added:
            watch(self._caller, actor).add_done_callback(lambda ended, actor=actor: self._ended(actor, ended))  # type: ignore[misc]
        self._tell()

    def error(self) -> LinkError | None:
        """The error for a receiver once every linked actor is dead; None before, and without any links."""
        with self._lock:
            if self._alive or not self._dead:
                return None
            ends = list(self._dead.values())
        reasons = [failure.root_cause().message if failure else f"{actor} has stopped" for actor, failure in ends]
        first = next((failure for _, failure in ends if failure is not None), None)
        return LinkError(
            f"no more values will arrive: every actor that this port is linked to is dead: {'; '.join(reasons)}", first
        )

    def _ended(self, actor: ActorRef, ended: Future[Any]) -> None:
        key = (actor.process.id, actor.uid)
        with self._lock:
            if self._alive.pop(key, None) is None:
                return  # it has been unlinked
            self._dead[key] = (actor, ended.get(0))
        self._tell()

    def _tell(self) -> None:
        if (error := self.error()) is not None:
            self._on_dead(error)
