"""`Transport`: one long-lived stream for each other process that this one talks to.

Within a host a stream is a packet socket (see `local_stream`), between hosts a plain bidirectional gRPC call with raw
bytes, with one connection each. Before anything of a stream is decoded, both ends prove that they know the job's secret
(see `auth`). Between two processes there is one stream, whichever end dialed it; if both dial at once, the dial of the
process with the smaller id counts, and the other is turned away.

Messages within the host are delivered by the thread that reads for the others (see `_poller`). Every dialed gRPC stream
has a thread of its own, incoming ones share a thread, and these threads deliver the messages. Events of links are
reported on the loop thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from skipper.control.model.errors import ControlError
from skipper.control.model.future import Future, peek
from skipper.control.wire import addresses
from skipper.control.wire.auth import NOT_ADMITTED
from skipper.control.wire.certificates import REVIEW_S, Certificates
from skipper.control.wire.handshake import WELCOME, Dial, Guest
from skipper.control.wire.heartbeats import Heartbeats
from skipper.control.wire.identity import MEMBERS, Role
from skipper.control.wire.link import Deliver, Link
from skipper.control.wire.message_stream import MessageStream, Status
from skipper.control.wire.messages import Bye
from skipper.control.wire.network import Connect, Network
from skipper.control.wire.process_ref import ProcessRef

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25
"""How long to wait, at first and later, for a process of this host that does not listen yet."""


class Transport:
    """The links of one process.

    Args:
        me: this process; it listens within its host and, if ``me.address`` says so, on TCP.
        secret: the job's secret.
        deliver: takes every message that arrives, in order for each process, on the thread of its stream.
        on_lost: called once for each process whose link is lost, on the loop thread, with the reason.
        on_connected: called when a link's stream stands, on the loop thread.
        on_dial: called when a process is being dialed, on the loop thread.
        find_address: finds where a process on another host listens; on the loop thread.
        home: the IP of the script's host; empty if no other host takes part.
        heartbeat_s: the silence after which a process counts as unreachable if it is not known to be alive.
        unresponsive_s: the same for a process that the operating system says is alive.
        connect_timeout_s: how long to wait for a process to become reachable.
        script_id: the id of the script's process, which must have a script's certificate.
        certificates: for TLS with other hosts; None: no TLS.
        network: listens and dials.
    """

    def __init__(
        self,
        me: ProcessRef,
        secret: bytes,
        loop: asyncio.AbstractEventLoop,
        *,
        deliver: Deliver,
        on_lost: Callable[[ProcessRef, str], None],
        on_connected: Callable[[ProcessRef], None],
        on_dial: Callable[[ProcessRef], None],
        find_address: Callable[[ProcessRef], Future[str]],
        home: Callable[[], str],
        heartbeat_s: float,
        unresponsive_s: float,
        connect_timeout_s: float,
        network: Network,
        script_id: str = "",
        certificates: Certificates | None = None,
    ) -> None:
        self._me = me
        self._secret = secret
        self._loop = loop
        self._deliver = deliver
        self._on_lost = on_lost
        self._on_connected = on_connected
        self._on_dial = on_dial
        self._find_address = find_address
        self._home = home
        self._script_id = script_id
        self._certificates = certificates
        self._connect_timeout_s = connect_timeout_s
        self._links: dict[str, Link] = {}
        self._heartbeats = Heartbeats(
            me,
            self._links,
            silence_s=heartbeat_s,
            unresponsive_s=unresponsive_s,
            is_elsewhere=self.is_elsewhere,
            lose=self.lose,
            script_id=script_id,
            pid=network.pid,
        )
        self._heard_of_forgotten = (0, 0)
        self._signs_of_forgotten = 0
        self._lock = threading.RLock()
        self._dials: dict[str, Dial] = {}
        """The dials that have neither succeeded nor failed, by the dialed process; on the loop thread."""
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._network = network
        self._closed = False
        self._stands_still = False
        self._unheard = asyncio.Event()
        """Set, during `close`, once no stream stands any more."""

    async def start(self) -> None:
        """Listen.

        Raises:
            WireError: the address cannot be listened on.
        """
        self._me = self._network.listen(self._me, self._certificates, self._take_in)
        self._spawn(self._heartbeats.run())
        if self._certificates is not None:
            self._spawn(self._review(self._certificates))

    @property
    def me(self) -> ProcessRef:
        """This process, with its address."""
        return self._me

    def listen_beyond(self, host: str, certificates: Certificates | None) -> None:
        """Listen on TCP, too, at an IP of this host; from any thread, and once.

        Raises:
            WireError: the address cannot be listened on.
        """
        self._certificates = certificates
        me = self._network.listen_beyond(self._me, host, certificates)
        if certificates is not None:
            self._tell(lambda: self._spawn(self._review(certificates)))
        self._me = me

    def is_elsewhere(self, peer: ProcessRef) -> bool:
        """Whether a process is on another host."""
        # A process without an IP is on the script's host: on other hosts all have one.
        here, there = addresses.host_of(self._me.address), addresses.host_of(peer.address)
        return (here or self._home()) != (there or self._home())

    def connected(self) -> int:
        """How many processes this one is connected to."""
        return sum(link.connected for link in list(self._links.values()))

    def heard(self) -> tuple[int, int]:
        """How many messages, and how many bytes, have come from others."""
        links = list(self._links.values())
        messages, nbytes = self._heard_of_forgotten
        return messages + sum(link.heard_messages for link in links), nbytes + sum(link.heard_nbytes for link in links)

    def heard_signs(self) -> int:
        """How many of these messages were signs of life."""
        return self._signs_of_forgotten + sum(link.heard_signs for link in list(self._links.values()))

    def heard_from_elsewhere(self) -> int:
        """How many messages have come from processes on other hosts that this one has a link to."""
        return sum(link.heard_messages for link in list(self._links.values()) if self.is_elsewhere(link.peer))

    def find(self, process_id: str) -> Link | None:
        """The link to this process, if there is one. From any thread."""
        return self._links.get(process_id)

    def link(self, peer: ProcessRef) -> Link:
        """The link to ``peer``, which is dialed unless it was before. From any thread."""
        link = self._links.get(peer.id)
        if link is None:
            link = self._new_link(peer)
            self._loop.call_soon_threadsafe(self._start_dialing, link)
        return link

    def expect(self, peer: ProcessRef) -> Link:
        """The link to a process that will dial this one, as its children do. From any thread."""
        return self._links.get(peer.id) or self._new_link(peer)

    def is_current(self) -> bool:
        """Whether the current thread delivers messages."""
        return self._network.is_current()

    def be_patient_with(self, peer: ProcessRef) -> None:
        """Never count this peer's silence as its death, or a long dial as a failure: it launched this process."""
        self._heartbeats.be_patient_with(peer)

    def lose(self, peer: ProcessRef, reason: str) -> None:
        """Give up the link to ``peer``, whichever end dials. On the loop thread."""
        link = self._links.get(peer.id) or self._new_link(peer)
        if (dial := self._dials.pop(peer.id, None)) is not None:
            dial.give_up(reason)
        if link.lose(reason) and not self._closed:
            self._on_lost(link.peer, reason)

    def fall_silent(self) -> None:
        """Write nothing on any link: this is the transport of a forked copy of the process."""
        for link in list(self._links.values()):
            link.fall_silent()
        self._network.fall_silent()

    def forget(self, process_id: str) -> None:
        """Remove a lost link: a later message to that process dials it again, and fails again. On the loop thread."""
        link = self._links.get(process_id)
        if link is not None and link.lost is not None:
            del self._links[process_id]
            messages, nbytes = self._heard_of_forgotten
            self._heard_of_forgotten = messages + link.heard_messages, nbytes + link.heard_nbytes
            self._signs_of_forgotten += link.heard_signs

    def stand_still(self) -> None:
        """Send and receive nothing more, with every stream still open, like a stopped process. For ever."""
        self._stands_still = True
        for task in list(self._tasks):
            task.cancel()
        for link in list(self._links.values()):
            link.stand_still()

    async def close(self, *, flush_timeout_s: float = 0.5) -> None:
        """Say goodbye, send posted messages, and end every stream."""
        if self._closed:
            return
        self._closed = True
        for link in list(self._links.values()):
            link.post(Bye())
        self._look_for_streams()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(flush_timeout_s):
                await self._unheard.wait()  # the others end their streams when they hear the goodbye
        await self._end_all(flush_timeout_s)

    async def cut(self) -> None:
        """End every stream at once, without a goodbye, as the kernel does for a killed process."""
        if not self._closed:
            self._closed = True
            await self._end_all(0.0)

    async def _end_all(self, flush_timeout_s: float) -> None:
        for link in list(self._links.values()):
            self.lose(link.peer, "this process has shut down")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._network.close(flush_timeout_s)

    def _new_link(self, peer: ProcessRef) -> Link:
        with self._lock:
            link = self._links.get(peer.id)
            if link is None:
                link = self._links[peer.id] = Link(peer, self._deliver, self._stream_ended)
            return link

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(lambda task: self._tasks.pop(task, None))

    def _tell(self, callback: Callable[..., object], *args: object) -> None:
        """Call a function on the loop thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
            self._loop.call_soon_threadsafe(callback, *args)

    async def _review(self, certificates: Certificates) -> None:
        """Give up the links to processes whose certificates are revoked."""
        while not self._closed:
            await asyncio.sleep(REVIEW_S)
            for link in list(self._links.values()):
                if link.identity is not None and link.connected and certificates.is_revoked(link.identity):
                    self.lose(link.peer, f"the certificate of {link.identity} was revoked")

    def _roles_of(self, peer: ProcessRef) -> Collection[Role]:
        """The roles that a process' certificate may have."""
        return (Role.SCRIPT,) if peer.id == self._script_id else MEMBERS

    # Links and their streams

    def _stream_ended(self, link: Link, reason: str) -> None:
        self._tell(self._end, link, reason)

    def _end(self, link: Link, reason: str) -> None:
        self.lose(link.peer, reason)
        if self._closed:
            self._look_for_streams()

    def _look_for_streams(self) -> None:
        if not any(link.connected for link in self._links.values()):
            self._unheard.set()

    def _open(self, link: Link, stream: MessageStream, *, greeting: bytes = b"") -> None:
        """Begin to serve a link over an authenticated stream; on the stream's thread."""
        self._tell(self._on_connected, link.peer)
        link.open(stream, greeting=greeting)
        self._heartbeats.greet(link)

    # Dialing

    def _start_dialing(self, link: Link) -> None:
        with self._lock:
            if link.connected or link.dialing or link.lost or self._closed:
                return
            link.dialing = True
        peer = link.peer
        # A frozen launcher answers when it continues, and the kernel reports its death: no limit for such peers.
        patience_s = math.inf if self._heartbeats.is_patient_with(peer) else self._connect_timeout_s
        deadline = self._loop.time() + patience_s
        if not self.is_elsewhere(peer):
            self._dial_here(link, deadline)
        elif not addresses.host_of(peer.address):
            self.lose(
                peer,
                "only its own host can reach it: it was started, or has joined, without an address for other hosts",
            )
        elif addresses.port_of(peer.address):
            self._dial(link, deadline, peer.address)
        else:
            self._dial_once_found(link, deadline)
        self._on_dial(peer)

    def _dial_once_found(self, link: Link, deadline: float) -> None:
        """Find out where the process listens, and dial it there."""

        def found(answer: Future[str]) -> None:
            try:
                address = peek(answer)
            except ControlError as error:
                self._tell(self.lose, link.peer, f"its launcher does not say where it listens: {error}")
            else:
                self._tell(self._dial_found, link, deadline, address)

        timeout = f"its launcher did not say within {self._connect_timeout_s:g} s at which address it listens"
        timer = self._loop.call_at(deadline, self.lose, link.peer, timeout)
        answer = self._find_address(link.peer)
        answer.add_done_callback(lambda _: self._tell(timer.cancel))
        answer.add_done_callback(found)

    def _dial_found(self, link: Link, deadline: float, address: str) -> None:
        if not (link.lost or self._closed):
            self._dial(link, deadline, address if addresses.host_of(address) else None)

    def _dial_here(self, link: Link, deadline: float, pause_s: float = _SHORTEST_PAUSE_S) -> None:
        """Dial a process of this host, again and again until it listens."""
        if link.lost or self._closed or link.connected:
            return
        try:
            self._dial(link, deadline, connect=self._network.within(link.peer.id))
        except PermissionError:
            self._dial(link, deadline)  # gRPC does not check the user
        except OSError as error:
            if self._loop.time() + pause_s < deadline:
                self._loop.call_later(pause_s, self._dial_here, link, deadline, min(2 * pause_s, _LONGEST_PAUSE_S))
                return
            reason = f"no answer within {self._connect_timeout_s:g} s: {error.strerror}"
            self._dial_failed(link, reason, Status("UNAVAILABLE"))

    def _dial(
        self,
        link: Link,
        deadline: float,
        address: str | None = None,
        connect: Connect | None = None,
    ) -> None:
        def opened(stream: MessageStream) -> None:
            link.identity = dial.identity
            with self._lock:
                link.dialing, link.connected, link.is_dialed = False, True, True
            self._tell(over)
            self._open(link, stream)

        def failed(reason: str, status: Status) -> None:
            self._tell(over)
            self._tell(self._dial_failed, link, reason, status, again)

        def again() -> None:
            if connect is None:
                self._dial(link, deadline, address)
            else:
                self._dial_here(link, deadline)

        def over() -> None:
            timer.cancel()
            self._dials.pop(link.peer.id, None)

        dial = Dial(
            self._me,
            link.peer,
            self._secret,
            on_open=opened,
            on_failure=failed,
            address=address and addresses.target(address),
            connect=connect or self._network.beyond(address),
            certificates=self._certificates if address else None,
            roles=self._roles_of(link.peer),
        )
        self._dials[link.peer.id] = dial
        timer = self._loop.call_at(deadline, dial.give_up, f"no answer within {self._connect_timeout_s:g} s")
        dial.stream.start(f"control-link-{link.peer.name}")

    def _dial_failed(self, link: Link, reason: str, status: Status, again: Callable[[], None] | None = None) -> None:
        if again is not None and status.name == "DEADLINE_EXCEEDED" and not (link.lost or self._closed):
            again()  # too many unproven streams pushed this dial out, or the other process gets too little CPU time
            return
        with self._lock:
            link.dialing = False
        if status.name == "ALREADY_EXISTS":  # both dialed at once and the other dial counts: it is on its way
            self._loop.call_later(self._connect_timeout_s, self._give_up_waiting, link)
        else:
            self.lose(link.peer, f"it could not be reached ({reason})")

    def _give_up_waiting(self, link: Link) -> None:
        if not (link.connected or self._closed):
            self.lose(link.peer, f"its own dial did not arrive within {self._connect_timeout_s:g} s")

    def _take_in(self, guest: Guest, peer: ProcessRef) -> None:
        """Serve a process that has dialed and proven itself; on the listener's thread."""
        if self._stands_still:
            return  # the process waits for an answer in vain
        if guest.identity is not None and guest.identity.role not in self._roles_of(peer):
            reason = f"{NOT_ADMITTED}: {guest.identity} is not the script of this job"
            guest.stream.turn_away("permission_denied", reason)
            return
        link = self._links.get(peer.id) or self._new_link(peer)
        with self._lock:
            ours_stands = link.dialing and self._me.id < peer.id
            stands_already = link.connected or ours_stands
            takes = not (link.lost or self._closed or stands_already)
            if takes:
                link.connected = True
                if addresses.port_of(peer.address):
                    link.peer = dataclasses.replace(
                        link.peer, address=peer.address
                    )  # only the process itself knows its port
        if takes:
            link.identity = guest.identity
            self._open(link, guest.stream, greeting=WELCOME)
        elif stands_already:
            guest.stream.turn_away("already_exists", "there is already a stream")
        else:
            guest.stream.turn_away("failed_precondition", link.lost or "this process is shutting down")
