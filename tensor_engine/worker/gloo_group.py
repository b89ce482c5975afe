"""`make_gloo`: gloo among the members of a group. The job's links identify each member before it gets a byte.

In gloo the member with the greater address connects to the other one, and each handles the others in rank order.

Within a host each member listens on a loopback address of its own, in the same order. So a member has connected to all
lower ranks before it waits for a higher one, and all can be admitted at once.

Members on several hosts listen on the addresses by which the job's hosts reach each other. There a member may wait for
one before it connects to the next. So they are admitted as they come, in as many rounds as needed.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import itertools
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from skipper.control import ControlError, Future, context
from skipper.control.runtime.join_file import this_network
from skipper.dataplane.config import HOST_VARIABLE
from skipper.tensor_engine.errors import CommunicationError, CommunicationTimeoutError, UnreachableMembersError
from skipper.tensor_engine.shared.rendezvous import JobStore, RendezvousClient, answer
from skipper.tensor_engine.worker.gloo_port import LOOPBACK, GlooPort
from skipper.trust import own_sockets
from skipper.trust.own_sockets import SocketPlace

T = TypeVar("T")
V = TypeVar("V")

_THREADS = 2  # a stream never has more in flight: one message arrives while another is processed
_LOOK_S = 0.001
"""How long to wait before the next look at this process's sockets: a connection within a host takes less."""
_MOST_LOOKS_S = 0.05


def make_gloo(rendezvous: RendezvousClient, name: str, rank: int, members: tuple[int, ...]) -> Any:
    """Gloo's backend for a group, whose ``members`` are in the order of their ranks.

    All members call it, and it returns once they are connected. Over the job's links they exchange that all have come,
    and where they listen; the addresses for gloo; from where each has connected; and that these connections are open
    for data.

    No member may close its own group before all have theirs: gloo would fail on the others. A member that has exchanged
    something with each of them knows that they have.

    Raises:
        CommunicationTimeoutError: others did not come in time; the message names them.
        MemberLostError: one of them has ended.
        UnreachableMembersError: they are on several hosts, and some of these have no address for the others.
        CommunicationError: one of them has failed.
    """
    size = len(members)
    port = GlooPort.open(str(ipaddress.IPv4Address(LOOPBACK) + rank))
    try:
        if size == 1:
            return dist.ProcessGroupGloo(HashStore(), 0, 1, _options(port, rendezvous))
        far = os.environ.get(HOST_VARIABLE, "")
        mine = _Arrival(secrets.token_hex(8), this_network(), far, _where(far), port.place.pack())
        here = rendezvous.gather(f"{name}/here", {rank: mine}, members)
        token = here[0].token
        are_near = len({arrival.network for arrival in here.values()}) == 1
        if are_near:
            places = [SocketPlace.parse(arrival.place) for arrival in here.values()]
            port.let_in()
        else:
            hosts = [arrival.far for arrival in here.values()]
            if not all(hosts):
                raise UnreachableMembersError(tuple(arrival.where for arrival in here.values()))
            port.close()
            port = GlooPort.open(far)
            mine_there = port.place.pack(), [_source_towards(host) for host in hosts]
            there = rendezvous.gather(f"{name}/{token}/there", {rank: mine_there}, members)
            places = [SocketPlace.parse(place) for place, _ in there.values()]
            port.let_in({sources[rank] for member, (_, sources) in there.items() if member != rank})
        store = _Addresses(rendezvous, f"{name}/{token}", rank, members)
        admission = _Admission(rendezvous, f"{name}/{token}", port, places, rank, members, at_once=are_near)
        with admission:
            options = _options(port, rendezvous)
            backend = _connect(lambda: dist.ProcessGroupGloo(store, rank, size, options), admission)
        store.forget_all()
        if admission.connections:
            _hang_up_on_the_lost(rendezvous, members, admission.connections)
        return backend
    finally:
        port.close()


def _options(port: GlooPort, rendezvous: RendezvousClient) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = datetime.timedelta(seconds=rendezvous.timeout_s)
    options._threads = _THREADS
    options._devices = [port.device]
    return options


@dataclass(frozen=True, slots=True)
class _Arrival:
    """What a member sends to the others when it comes.

    Attributes:
        token: the key under which all meet from then on, if this is the first member.
        network: its host and network namespace.
        far: the address by which other hosts reach it; empty if they do not.
        where: the host, the network namespace and that address, for people.
        place: where it listens for members of the same network.
    """

    token: str
    network: str
    far: str
    where: str
    place: bytes


def _hang_up_on_the_lost(
    rendezvous: RendezvousClient, members: tuple[int, ...], connections: Mapping[int, tuple[SocketPlace, SocketPlace]]
) -> None:
    """End the connections to members that the job has lost, perhaps with their host: the network may not notice it."""

    def hang_up(found: Future[list[int]]) -> None:
        with contextlib.suppress(ControlError):  # the job is over
            lost = {members.index(number) for number in found.get(0)}
            ended = [ends for rank, ends in connections.items() if rank in lost]
            own_sockets.hang_up(lambda ends: ends in ended)
            if left := tuple(number for rank, number in enumerate(members) if rank not in lost):
                wait(left)

    def wait(for_whom: tuple[int, ...]) -> None:
        rendezvous.actor.until_lost.call_one(for_whom).add_done_callback(hang_up)

    wait(members)


def _source_towards(host: str) -> str:
    """The address of this host from which the kernel connects to another one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as unsent:
        try:
            unsent.connect((host, 9))
        except OSError as error:
            raise CommunicationError(f"this host has no route to the member on {host}: {error}") from error
        return str(unsent.getsockname()[0])


def _where(far: str) -> str:
    namespace = os.stat("/proc/thread-self/ns/net").st_ino
    reached = f"reached at {far}" if far else "with no address for other hosts"
    return f"{context().actor_instance.actor_id} on {socket.gethostname()}, network namespace {namespace}, {reached}"


def _connect(make: Callable[[], Any], admission: _Admission) -> Any:
    """Run gloo's constructor in a thread. If a member fails it may wait for ever; then the thread is abandoned.

    Raises:
        CommunicationError: the group has failed.
    """
    ended: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            ended.put((make(), None))
        except Exception as error:  # noqa: BLE001  (raised by the caller)
            ended.put((None, error))
            admission.give_up()

    threading.Thread(target=run, name="gloo-connect", daemon=True).start()
    admission.wait()
    try:
        backend, error = ended.get(timeout=admission.rendezvous.timeout_s)
    except queue.Empty:
        raise CommunicationTimeoutError(
            f"the group was not complete within {admission.rendezvous.timeout_s:g} s after its members arrived"
        ) from None
    if error is not None:
        raise error
    return backend


class _Addresses(JobStore):
    """The store that gloo's constructor uses: each member sets one key that ends in its rank, and reads all of them.

    So one gathering exchanges these keys. Other keys, which the gloo of older torch uses, work as in any store.
    """

    def __init__(self, rendezvous: RendezvousClient, name: str, rank: int, members: tuple[int, ...]) -> None:
        super().__init__(rendezvous, name, members, is_written_once=True)
        self._begin = partial(rendezvous.begin_gathering, f"{name}/addresses", members=members)
        self._timeout_s = rendezvous.timeout_s
        self._rank = rank
        self._addresses: Future[dict[int, bytes]] | None = None
        self._has_others = False

    def set(self, key: str, value: bytes | str) -> None:
        """Tell the other members."""
        if _rank_of(key) == self._rank:
            told = value.encode() if isinstance(value, str) else value
            self._addresses = self._begin(brought={self._rank: told})
        else:
            self._has_others = True
            super().set(key, value)

    def get(self, key: str) -> bytes:
        """The value, once all members have set theirs."""
        rank = _rank_of(key)
        if rank is None or self._addresses is None:
            return super().get(key)
        return answer(self._addresses, self._timeout_s)[rank]

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Return once all keys are there."""
        for key in keys:
            self.get(key)

    def forget_all(self) -> None:
        """This member does not need the store any more."""
        if self._has_others:
            self.forget()


def _rank_of(key: str) -> int | None:
    last = key.rpartition("/")[2]
    return int(last) if last.isdecimal() else None


class _GivenUpError(CommunicationError):
    """gloo's constructor has failed, and raises its own error."""


class _Admission:
    """Admits the other members while gloo waits for them: in a thread, since gloo blocks the calling one.

    Attributes:
        connections: to members of other hosts, by rank: this end and the other one.
        failure: why the group has failed.
        rendezvous: where the members meet.
    """

    def __init__(
        self,
        rendezvous: RendezvousClient,
        name: str,
        port: GlooPort,
        places: Sequence[SocketPlace],
        rank: int,
        members: tuple[int, ...],
        *,
        at_once: bool,
    ) -> None:
        self.connections: dict[int, tuple[SocketPlace, SocketPlace]] = {}
        self.failure: CommunicationError | None = None
        self.rendezvous = rendezvous
        self._name = name
        self._port = port
        self._places = places
        self._rank = rank
        self._members = members
        self._let_in = self._let_in_at_once if at_once else self._let_in_by_turns
        self._is_given_up = False
        self._wakes = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gloo-admission", daemon=True)

    def wait(self) -> None:
        """Wait until all are connected.

        Raises:
            CommunicationError: they are not.
        """
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def give_up(self) -> None:
        """Stop admitting members."""
        self._is_given_up = True
        self._wakes.set()

    def __enter__(self) -> _Admission:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.give_up()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._let_in()
        except _GivenUpError:
            return
        except CommunicationError as error:
            self.failure = error
        except OSError as error:
            self.failure = CommunicationError(f"the connections of the group cannot be looked at: {error}")

    def _let_in_at_once(self) -> None:
        rank, port = self._rank, self._port
        lower = self._places[:rank]

        def outgoing() -> list[SocketPlace] | None:
            found = port.outgoing(lower)
            return [found[place] for place in lower] if len(found) == len(lower) else None

        connected = self._meet("connected", self._look(outgoing))
        incoming = {connected[member][rank] for member in range(rank + 1, len(self._places))}
        self._look(lambda: port.take(incoming) == incoming or None)
        self._meet("taken", None)
        port.kick(lower)

    def _let_in_by_turns(self) -> None:
        """In rounds until all are admitted: each member reports its connections, and admits the ones reported to it."""
        rank, port, size = self._rank, self._port, len(self._places)
        others = {place: member for member, place in enumerate(self._places) if member != rank}
        sources: dict[SocketPlace, int] = {}
        taken: set[SocketPlace] = set()
        kicked: set[int] = set()
        pauses = self._pauses()
        for turn in itertools.count():
            connected = {others[there]: here for there, here in port.outgoing(others).items()}
            self.connections |= {member: (here, self._places[member]) for member, here in connected.items()}
            told = self._meet(f"turn {turn}", (connected, [sources[place] for place in taken]))
            sources |= {their[rank]: member for member, (their, _) in told.items() if rank in their}
            taken = port.take(sources)
            self.connections |= {sources[place]: (port.place, place) for place in taken}
            has_taken_this = {member for member, (_, theirs) in told.items() if rank in theirs}
            port.kick({self._places[member] for member in has_taken_this - kicked})
            kicked |= has_taken_this
            if sum(len(theirs) for _, theirs in told.values()) == size * (size - 1) // 2:
                return
            self._wait(next(pauses))

    def _look(self, look: Callable[[], T | None]) -> T:
        """Look at this process's sockets until there is something, and return it."""
        pauses = self._pauses()
        while (found := look()) is None:
            self._wait(next(pauses))
        return found

    def _pauses(self) -> Iterator[float]:
        """Seconds to wait before another look, until the deadline."""
        deadline = time.monotonic() + self.rendezvous.timeout_s
        pause_s = _LOOK_S
        while time.monotonic() < deadline:
            yield pause_s
            pause_s = min(1.1 * pause_s, _MOST_LOOKS_S)
        raise CommunicationTimeoutError(f"members of the group did not connect within {self.rendezvous.timeout_s:g} s")

    def _meet(self, what: str, brought: V) -> dict[int, V]:
        """Exchange a value; returns the values of all members, including this one."""
        self._wakes.clear()
        if self._is_given_up:
            raise _GivenUpError
        gathered = self.rendezvous.begin_gathering(f"{self._name}/{what}", {self._rank: brought}, self._members)
        gathered.add_done_callback(lambda _: self._wakes.set())
        self._wait(self.rendezvous.timeout_s)
        return answer(gathered, 0)

    def _wait(self, most_s: float) -> None:
        self._wakes.wait(most_s)
        if self._is_given_up:
            raise _GivenUpError
