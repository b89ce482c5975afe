"""`VirtualNetwork`: streams between simulated processes, their delays, and how they fail.

A stream brings what it carries once and in order, or breaks: so do sockets of packets and TCP. What is on its way when
one breaks is lost. A partition keeps what is sent until it is over.
"""

from __future__ import annotations

import dataclasses
import errno
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from skipper.control.wire import addresses
from skipper.control.wire.certificates import Certificates
from skipper.control.wire.handshake import Guest
from skipper.control.wire.message_stream import CLOSED, Metadata, Status, User
from skipper.control.wire.network import Connect, OnProven
from skipper.control.wire.process_ref import ProcessRef
from tests.simulation.processes import SimulatedProcess
from tests.simulation.world import World

MAX_NBYTES = 1 << 16
"""Of one packet."""

_TOLD_S = 0.2
"""Within this time both ends of a stream know that it has broken."""

_PORT = 4000


@dataclasses.dataclass(slots=True)
class Weather:
    """How the network is.

    Attributes:
        within_s: how long a packet takes within a host, at most, where nothing is in its way.
        beyond_s: likewise between hosts.
        late: the share of packets that take much longer.
        late_s: how much longer, at most.
        busy: the share of packets whose sender is told later that they are out.
    """

    within_s: float = 200e-6
    beyond_s: float = 2e-3
    late: float = 0.02
    late_s: float = 0.3
    busy: float = 0.05


class Ether:
    """What the networks of all processes have together."""

    def __init__(self, world: World, weather: Weather) -> None:
        self.world = world
        self.weather = weather
        self.by_id: dict[str, VirtualNetwork] = {}
        self.by_address: dict[str, VirtualNetwork] = {}
        self.streams: dict[VirtualStream, None] = {}
        """Both ends of all that stand, or are about to."""
        self.keeping: dict[VirtualStream, None] = {}
        """Those of them that keep what has come for the end of a partition."""
        self.dialed = 0
        """How many ends there have been."""
        self._cut: set[tuple[str, str]] = set()
        """Pairs of hosts between which nothing comes through."""
        self.ports = 0

    def delay_s(self, one: SimulatedProcess, other: SimulatedProcess) -> float:
        """How long a packet takes."""
        weather, chance = self.weather, self.world.chance
        usual_s = weather.within_s if one.ip == other.ip else weather.beyond_s
        delay_s = usual_s * (0.1 + 0.9 * chance.random())
        return delay_s + weather.late_s * chance.random() if chance.random() < weather.late else delay_s

    def is_cut(self, one: SimulatedProcess, other: SimulatedProcess) -> bool:
        """Whether nothing comes through between two processes."""
        return bool(self._cut) and (one.ip, other.ip) in self._cut

    def cut(self, one: str, other: str) -> None:
        """Let nothing through between two hosts."""
        self._cut |= {(one, other), (other, one)}

    def heal(self, one: str, other: str) -> None:
        """Let everything through that has been kept, and that comes."""
        self._cut -= {(one, other), (other, one)}
        for stream in sorted(self.keeping, key=lambda stream: stream.number):
            stream.go_on()

    def process_gone(self, process: SimulatedProcess, *, silently: bool) -> None:
        """The kernel closes what a process had, or its host is gone without a word."""
        network = process.network
        if not silently:  # else whoever dials it hears nothing, not even a refusal
            self.by_id.pop(network.process_id, None)
            self.by_address.pop(network.address, None)
        for stream in list(network.streams):
            if not silently:
                stream.close_other()
            stream.drop()


class VirtualNetwork:
    """The network of one process: a `Network`."""

    def __init__(self, ether: Ether, owner: SimulatedProcess, secret: bytes) -> None:
        self.pid = 0
        self.owner = owner
        self.process_id = ""
        self.address = ""
        self.on_proven: OnProven | None = None
        self.secret = secret
        self.is_delivering = 0
        self.streams: dict[VirtualStream, None] = {}
        """The ends of this process."""
        self._ether = ether

    def listen(self, me: ProcessRef, certificates: Certificates | None, on_proven: OnProven) -> ProcessRef:
        """See `Network.listen`."""
        self.on_proven, self.process_id = on_proven, me.id
        self._ether.by_id[me.id] = self
        if host := addresses.host_of(me.address):
            self._ether.ports += 1
            self.address = addresses.at(host, _PORT + self._ether.ports)
            self._ether.by_address[self.address] = self
            return dataclasses.replace(me, address=self.address)
        return me

    def listen_beyond(self, me: ProcessRef, host: str, certificates: Certificates | None) -> ProcessRef:
        """Nobody asks for it: who is to be reached from other hosts is so from the beginning."""
        raise AssertionError

    def within(self, process_id: str) -> Connect:
        """See `Network.within`."""
        return partial(self._connect, partial(self._ether.by_id.get, process_id), True)

    def beyond(self, address: str | None) -> Connect | None:
        """See `Network.beyond`."""
        assert address is not None  # within a host, packets
        return partial(self._connect, partial(self._ether.by_address.get, address), False)

    def is_current(self) -> bool:
        """See `Network.is_current`."""
        return self.is_delivering > 0

    def fall_silent(self) -> None:
        """Nobody forks."""
        raise AssertionError

    async def close(self, patience_s: float) -> None:
        """See `Network.close`."""
        self._ether.by_id.pop(self.process_id, None)
        self._ether.by_address.pop(self.address, None)
        self.on_proven = None

    def _connect(
        self, find: Callable[[], VirtualNetwork | None], is_refused_at_once: bool, metadata: Metadata, user: User
    ) -> VirtualStream:
        if is_refused_at_once and find() is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
        return VirtualStream(self._ether, self, user, metadata, find)


class VirtualStream:
    """One end of a stream: a `DialingStream`, or a `DialedStream`.

    Attributes:
        user, flows, max_nbytes, metadata: as there.
        number: of the end, in the order in which they come to be.
    """

    __slots__ = (
        "_arrival_s",
        "_coming",
        "_ether",
        "_find",
        "_is_over",
        "_kept",
        "_network",
        "_other",
        "_world",
        "flows",
        "metadata",
        "number",
        "other_owner",
        "owner",
        "user",
    )

    max_nbytes = MAX_NBYTES

    def __init__(
        self,
        ether: Ether,
        network: VirtualNetwork,
        user: Any,
        metadata: Metadata,
        find: Callable[[], VirtualNetwork | None] | None,
    ) -> None:
        self.user: Any = user
        self.flows = False
        self.metadata: dict[str, Any] = dict(metadata)
        self.owner = network.owner
        self.other_owner: SimulatedProcess | None = None
        self._network = network
        self._ether = ether
        self._world = ether.world
        self._find = find
        self._other: VirtualStream | None = None
        self._is_over = False
        """Whether nothing is sent or delivered here any more."""
        self._arrival_s = 0.0
        """When the last thing arrives at the other end that this one has sent."""
        self._coming: deque[tuple[Callable[..., object], object]] = deque()
        """What the other end has sent, in that order; whenever something arrives, that is the first of it."""
        self._kept = 0
        """How much has arrived and is kept by a partition."""
        ether.dialed += 1
        self.number = ether.dialed
        ether.streams[self] = network.streams[self] = None

    # For both ends

    def send(self, message: bytes) -> bool:
        """See `MessageStream.send`."""
        if self._is_over:
            return True
        self._carry(VirtualStream._receive, message)
        if self.flows and self._world.chance.random() < self._ether.weather.busy:
            self._world.soon(self.owner, self._out)
            return False
        return True

    def flush_soon(self, flush: Callable[[], object]) -> bool:
        """See `MessageStream.flush_soon`."""
        self._world.soon(self.owner, flush)
        return True

    def receive(self) -> None:
        """Do nothing: whatever comes is delivered."""

    def end(self) -> None:
        """See `MessageStream.end`."""
        if not self._is_over:
            self.close_other()
            self.drop()
            self._world.soon(self.owner, self._tell_end, CLOSED)

    def break_off(self) -> None:
        """Break it: both ends are told, and what is on its way is lost."""
        other = self._other
        for end in (self, other):
            if end is not None and not end._is_over:
                end.drop()
                when_s = self._world.now_s + _TOLD_S * self._world.chance.random()
                self._world.at(when_s, end.owner, end._tell_end, Status("UNAVAILABLE", "broken by the schedule"))

    def close_other(self, status: Status = CLOSED) -> None:
        """Tell the other end, behind what is on its way, that this one is closed."""
        self._carry(VirtualStream._end_by, status)

    def drop(self) -> None:
        """Neither send nor deliver anything any more."""
        self._is_over = True
        self._coming.clear()
        for streams in (self._ether.streams, self._ether.keeping, self._network.streams):
            streams.pop(self, None)

    def go_on(self) -> None:
        """Deliver what a partition has kept."""
        kept, self._kept = self._kept, 0
        del self._ether.keeping[self]
        for _ in range(kept):
            self._world.at(self._world.now_s, self.owner, self._come)

    # The dialing end

    def start(self, name: str) -> None:
        """See `DialingStream.start`."""
        target = self._find() if self._find is not None else None
        if target is None:
            self._refuse()
            return
        self.other_owner = target.owner
        when_s = self._world.now_s + self._ether.delay_s(self.owner, target.owner)
        self._world.at(when_s, None, self._arrive, target)

    def _arrive(self, target: VirtualNetwork) -> None:
        if self._is_over or self.owner.is_dead:
            return
        if self._ether.is_cut(self.owner, target.owner):
            self._world.at(self._world.now_s + 0.5, None, self._arrive, target)  # the kernel tries again
            return
        if target.owner.is_silent:
            return
        if target.owner.is_dead or target.on_proven is None:
            self._refuse()
            return
        other = VirtualStream(self._ether, target, None, tuple(self.metadata.items()), None)
        other._other, other.other_owner, self._other = self, self.owner, other
        self._world.at(self._world.now_s, target.owner, other._greet)

    def _refuse(self) -> None:
        self.drop()
        self._world.soon(self.owner, self._tell_end, Status("UNAVAILABLE", "nobody listens"))

    # The dialed end

    def _greet(self) -> None:
        network = self._network
        if network.on_proven is None or self._is_over:
            self.end()
            return
        guest = Guest(self, network.process_id, network.secret, on_proven=network.on_proven, on_gone=lambda guest: None)
        guest.receive()

    def shown(self) -> list[bytes] | None:
        """There is no TLS."""
        return None

    def answer(self, metadata: Metadata) -> None:
        """See `DialedStream.answer`."""
        self._carry(VirtualStream._open, dict(metadata))

    def turn_away(self, name: str, details: str) -> None:
        """See `DialedStream.turn_away`."""
        if not self._is_over:
            self.close_other(Status(name.upper(), details))
            self.drop()
            self._world.soon(self.owner, self._tell_end, CLOSED)

    # What comes

    def _carry(self, call: Callable[..., object], argument: object) -> None:
        other = self._other
        if other is None or other._is_over:
            return
        self._arrival_s = max(self._arrival_s, self._world.now_s + self._ether.delay_s(self.owner, other.owner))
        other._coming.append((call, argument))
        self._world.at(self._arrival_s, other.owner, other._come)

    def _come(self) -> None:
        assert self.other_owner is not None
        if self._is_over:
            return
        if self._kept or self._ether.is_cut(self.owner, self.other_owner):
            self._kept += 1
            self._ether.keeping[self] = None
            return
        call, argument = self._coming.popleft()
        network = self._network
        network.is_delivering += 1
        try:
            call(self, argument)
        finally:
            network.is_delivering -= 1

    def _receive(self, message: bytes) -> None:
        self.user.received(message)

    def _open(self, metadata: dict[str, Any]) -> None:
        self.user.opened(metadata)

    def _end_by(self, status: Status) -> None:
        self.drop()
        self._tell_end(status)

    def _tell_end(self, status: Status) -> None:
        if self.user is not None:
            self.user.ended(status)

    def _out(self) -> None:
        self.user.sent()
