"""The ports of a process: numbered places where replies arrive, and what becomes of them there."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from control.errors import LinkError, SupervisionError
from control.future import Future
from control.runtime.messages import ActorRef, Loss
from control.runtime.replies import open_reply
from control.shape import Extent
from control.value_mesh import ValueMesh
from control.wire.envelope import Kind, Payload

if TYPE_CHECKING:
    from control.runtime.links import Links
    from control.runtime.process import Process

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Awaited:
    """Whose answer is waited for.

    Attributes:
        process_id: where it is to come from.
        who: for people.
        endpoint: what was asked.
        actor: who was asked, if it was an actor.
    """

    process_id: str
    who: str
    endpoint: str
    actor: ActorRef | None = None

    def error(self, loss: Loss) -> SupervisionError:
        """What a caller is told when this answer will never come."""
        failure = None if self.actor is None else self.actor.death(loss)
        return SupervisionError(f"{self.who} cannot answer {self.endpoint}: {loss.reason}", failure)

    def raiser(self, loss: Loss) -> Callable[[], Any]:
        """A function that raises that."""
        error = self.error(loss)

        def raise_supervision_error() -> Any:
            raise error

        return raise_supervision_error


class Reply(Protocol):
    """What stands behind a port."""

    def deliver(self, rank: int, kind: Kind, payload: Payload) -> bool:
        """Take a reply, on the thread that brought it; True where nothing more is expected."""

    def process_lost(self, process_id: str, loss: Loss) -> bool:
        """Give up on the replies of a process; True where nothing more is expected."""

    def entrust(self, rank: int) -> None:
        """Note that the reply of this rank may come from elsewhere: links tell from now on whether it can."""

    def lapse(self, rank: int, error: LinkError) -> bool:
        """Note that every actor linked for this rank is dead; True where nothing more is expected."""


class PortTable:
    """The open ports of a process; safe to use from any thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, Reply] = {}
        self._links: dict[int, dict[int, Links]] = {}
        self._link_lock = threading.Lock()

    def open(self, reply: Reply) -> int:
        """A new port's number; never 0."""
        number = next(self._numbers)
        self._open[number] = reply
        return number

    def open_at(self, number: int, reply: Reply) -> None:
        """Open a port with a number of the caller's choice."""
        self._open[number] = reply

    def is_open(self, number: int) -> bool:
        """Whether something is still expected there."""
        return number in self._open

    def close(self, number: int) -> None:
        """Forget a port; what still arrives for it is dropped."""
        self._open.pop(number, None)
        if self._links:
            self._links.pop(number, None)

    def deliver(self, number: int, rank: int, kind: Kind, payload: Payload) -> None:
        """Bring a reply to its port."""
        reply = self._open.get(number)
        if reply is not None and reply.deliver(rank, kind, payload):
            self.close(number)

    def link(
        self, process: Process, number: int, rank: int, add: Iterable[ActorRef], remove: Iterable[ActorRef]
    ) -> None:
        """Change what a port, or one rank of those who share it, is linked to."""
        from control.runtime.links import Links

        with self._link_lock:
            reply = self._open.get(number)
            if reply is None:
                return
            of_port = self._links.setdefault(number, {})
            links = of_port.get(rank)
            if links is None:
                links = of_port[rank] = Links(process, lambda error: self._lapse(number, rank, error))
                reply.entrust(rank)
        links.change(add, remove)

    def undelivered(self, number: int, loss: Loss) -> None:
        """Tell a `Notice` that its message was for a process that is gone."""
        from control.runtime.notices import Notice

        notice = self._open.get(number)
        if isinstance(notice, Notice):
            notice.lost(loss)

    def link_error(self, number: int) -> LinkError | None:
        """What a receiver at a port is told if nothing has arrived: an error where all linked actors are dead."""
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


class OneReply:
    """One reply, for a future."""

    __slots__ = ("_awaited", "_entrusted", "_future")

    def __init__(self, future: Future[Any], awaited: Awaited) -> None:
        self._future = future
        self._awaited = awaited
        self._entrusted = False

    def deliver(self, rank: int, kind: Kind, payload: Payload) -> bool:
        """Take a reply."""
        self._future._settle(lambda: open_reply(kind, payload))
        return True

    def process_lost(self, process_id: str, loss: Loss) -> bool:
        """Give up on the replies of a process."""
        if self._entrusted or process_id != self._awaited.process_id:
            return False
        self._future._settle(self._awaited.raiser(loss))
        return True

    def entrust(self, rank: int) -> None:
        """The reply may come from elsewhere."""
        self._entrusted = True

    def lapse(self, rank: int, error: LinkError) -> bool:
        """Whoever might have replied is dead."""
        self._future._settle(_raiser(error))
        return True


class MeshReply:
    """A reply from each member of a mesh, for one future; the first error settles it."""

    __slots__ = ("_awaited", "_entrusted", "_extent", "_future", "_missing", "_payloads")

    def __init__(self, future: Future[ValueMesh[Any]], extent: Extent, awaited: Sequence[Awaited]) -> None:
        self._future = future
        self._extent = extent
        self._awaited = awaited
        self._payloads: list[Payload | None] = [None] * len(awaited)
        self._missing = set(range(len(awaited)))
        self._entrusted: set[int] = set()

    def deliver(self, rank: int, kind: Kind, payload: Payload) -> bool:
        """Take a reply."""
        if kind is Kind.ERROR:
            self._future._settle(lambda: open_reply(kind, payload))
            return True
        if rank not in self._missing:
            return False
        self._payloads[rank] = payload
        self._missing.discard(rank)
        if self._missing:
            return False
        self._future._settle(self._open_all)
        return True

    def process_lost(self, process_id: str, loss: Loss) -> bool:
        """Give up on the replies of a process."""
        for rank in sorted(self._missing - self._entrusted):
            if self._awaited[rank].process_id == process_id:
                self._future._settle(self._awaited[rank].raiser(loss))
                return True
        return False

    def entrust(self, rank: int) -> None:
        """The reply of this rank may come from elsewhere."""
        self._entrusted.add(rank)

    def lapse(self, rank: int, error: LinkError) -> bool:
        """Whoever might have replied is dead."""
        self._future._settle(_raiser(error))
        return True

    def _open_all(self) -> ValueMesh[Any]:
        payloads = (payload for payload in self._payloads if payload is not None)
        return ValueMesh(self._extent, [open_reply(Kind.REPLY, payload) for payload in payloads])


class ResponseStream(Generic[T_co]):
    """The results of a call to several actors, in the order in which they come.

    ``async for`` yields results; ``for`` yields futures, the n-th of which ends with the n-th result to come. An
    error is raised where its result would have been, and the stream goes on behind it.
    """

    def __init__(self, size: int) -> None:
        self._futures: list[Future[T_co]] = [Future() for _ in range(size)]
        self._next = 0
        self._unsettled = deque(self._futures)

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

    def _push(self, open_result: Callable[[], Any]) -> None:
        self._unsettled.popleft()._settle(open_result)


class StreamReply:
    """A reply from each member of a mesh, for a stream."""

    __slots__ = ("_awaited", "_entrusted", "_missing", "_stream")

    def __init__(self, stream: ResponseStream[Any], awaited: Sequence[Awaited]) -> None:
        self._stream = stream
        self._awaited = awaited
        self._missing = set(range(len(awaited)))
        self._entrusted: set[int] = set()

    def deliver(self, rank: int, kind: Kind, payload: Payload) -> bool:
        """Take a reply."""
        if self._claim(rank):
            self._stream._push(lambda: open_reply(kind, payload))
        return not self._missing

    def process_lost(self, process_id: str, loss: Loss) -> bool:
        """Give up on the replies of a process."""
        for rank in sorted(self._missing - self._entrusted):
            if self._awaited[rank].process_id == process_id and self._claim(rank):
                self._stream._push(self._awaited[rank].raiser(loss))
        return not self._missing

    def entrust(self, rank: int) -> None:
        """The reply of this rank may come from elsewhere."""
        self._entrusted.add(rank)

    def lapse(self, rank: int, error: LinkError) -> bool:
        """Whoever might have replied is dead."""
        if self._claim(rank):
            self._stream._push(_raiser(error))
        return not self._missing

    def _claim(self, rank: int) -> bool:
        """Whether it is for the calling thread to fill this rank's place: it is so once."""
        try:
            self._missing.remove(rank)
        except KeyError:
            return False
        return True


class Acknowledgements:
    """An acknowledgement from each of several processes; one that is gone counts as having given it."""

    def __init__(self, future: Future[None], process_ids: Sequence[str]) -> None:
        self._future = future
        self._process_ids = process_ids
        self._missing = set(range(len(process_ids)))
        self._error: Callable[[], Any] | None = None

    def deliver(self, rank: int, kind: Kind, payload: Payload) -> bool:
        """Take a reply."""
        if kind is Kind.ERROR and self._error is None:
            self._error = lambda: open_reply(kind, payload)
        return self._acknowledged({rank})

    def process_lost(self, process_id: str, loss: Loss) -> bool:
        """Give up on the replies of a process."""
        return self._acknowledged({rank for rank in self._missing if self._process_ids[rank] == process_id})

    def entrust(self, rank: int) -> None:
        """Void: it is processes that acknowledge, and no port of theirs is passed on."""

    def lapse(self, rank: int, error: LinkError) -> bool:
        """Void, too."""
        return False

    def _acknowledged(self, ranks: set[int]) -> bool:
        self._missing -= ranks
        if not self._missing:
            self._future._settle(self._error or (lambda: None))
        return not self._missing


def _raiser(error: LinkError) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it
