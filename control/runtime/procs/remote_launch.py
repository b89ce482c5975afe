"""`RemoteLaunch`: processes that one process launches for an actor of another, and the addresses of its children.

The owner of processes on another host asks its job's process there to launch them, to report their ends, and to stop
them. They end with that process, and it ends them when their owner's process is gone.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from skipper.control.model.errors import ControlError, SupervisionError
from skipper.control.model.future import Future, Promise, both, peek
from skipper.control.runtime.interfaces import Requester
from skipper.control.runtime.messages import LaunchOrder, Mail
from skipper.control.runtime.procs.binding import CpuBinding
from skipper.control.runtime.requests import ADDRESS, EXIT, KILL_GIVEN_UP, KILL_LAUNCHED, LAUNCH, STOP_LAUNCHED
from skipper.control.runtime.stops import HANDED_DOWN
from skipper.control.wire.addresses import port_of, within_host
from skipper.control.wire.process_ref import ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.process_state import ProcessState
    from skipper.control.runtime.procs.children import Children
    from skipper.control.runtime.request_server import RequestServer
    from skipper.control.wire.transport import Transport


class RemoteLaunch:
    """Both ends of launching for others, in one process. For any thread."""

    def __init__(
        self,
        state: ProcessState,
        loop: asyncio.AbstractEventLoop,
        requester: Requester,
        transport: Transport,
        children: Children,
        requests: RequestServer,
        *,
        watch: Callable[[ProcessRef], object],
    ) -> None:
        self._state = state
        self._loop = loop
        self._requester = requester
        self._transport = transport
        self._children = children
        self._watch = watch
        self._on_root_gone: Callable[[str], None] | None = None
        self._launched: dict[int, tuple[ProcessRef, tuple[ProcessRef, ...]]] = {}
        """By the number of the mesh: the process of its owner, and its members that are here."""
        self._asked: dict[str, list[Promise[str]]] = {}
        """Futures for the addresses of processes that are not up yet. On the loop thread."""
        self._to_end: set[str] = set()
        self._ours: dict[str, ProcessRef] = {}
        """The host of each process that was launched there for an actor of this process."""
        self._adopted: dict[int, Callable[[], Future[None]]] = {}
        self._lock = threading.Lock()
        self._unknown: dict[str, list[Promise[str]]] = {}
        """Futures for the ends of processes that have not been launched yet."""
        self._hosts: dict[str, tuple[ProcessRef, Promise[str]]] = {}
        """The job's processes on attached hosts, if this is the script's process."""
        requests.serve(LAUNCH, self._asked_to_launch)
        requests.serve(STOP_LAUNCHED, self._asked_to_stop)
        requests.serve(KILL_LAUNCHED, self._asked_to_kill)
        requests.serve(KILL_GIVEN_UP, self._asked_to_kill_one)
        requests.serve(ADDRESS, self._asked_for_address)

    def stand_for_job(self, on_root_gone: Callable[[str], None]) -> None:
        """Make this process its job's process on a host; the function is called when the script is gone."""
        self._on_root_gone = on_root_gone

    @property
    def is_host(self) -> bool:
        """Whether this process is its job's process on a host."""
        return self._on_root_gone is not None

    # On the script's side

    def attached(self, host: ProcessRef) -> None:
        """Note the job's process on another host."""
        self._hosts[host.id] = host, Promise()

    def hosts(self) -> list[ProcessRef]:
        """The job's processes on other hosts."""
        return [host for host, _ in list(self._hosts.values())]

    def end_of(self, process_id: str) -> Future[str] | None:
        """A future that ends with the reason when a process that is not a child ends; None if it is unknown.

        On a host the process may be launched soon: the requester can have heard of it before this process.
        """
        if (known := self._hosts.get(process_id)) is not None:
            return known[1]
        if not self.is_host:
            return None
        future: Promise[str] = Promise()
        with self._lock:
            self._unknown.setdefault(process_id, []).append(future)
        self._on_loop(self._loop.call_later, self._state.settings.connect_timeout_s, self._not_launched, process_id)
        return future

    def _not_launched(self, process_id: str) -> None:
        with self._lock:
            waiting = self._unknown.pop(process_id, ())
        for promise in waiting:
            promise.set_result("its launcher does not know this process")

    def _follow(self, process_id: str) -> None:
        """Report the end of a child to requesters that asked before it was a child."""
        with self._lock:
            waiting = self._unknown.pop(process_id, ())
        if (child := self._children.get(process_id)) is not None:
            for future in waiting:
                child.ended.add_done_callback(functools.partial(_copy, to=future))

    # On the owner's side

    def adopt(self, uid: int, stop: Callable[[], Future[None]]) -> None:
        """Set how a mesh of processes is stopped that nobody has launched, since they have joined."""
        self._adopted[uid] = stop

    def launch_afar(self, host: ProcessRef, uid: int, order: LaunchOrder) -> None:
        """Have processes launched on another host; a failure is reported like any end of a process."""
        answer = self._requester.request(host, LAUNCH, order, target=uid)

        def told(answer: Future[None]) -> None:
            try:
                peek(answer)
            except ControlError as error:
                for member in order.members:
                    self._on_loop(self._transport.lose, member, f"it could not be launched: {error}")

        answer.add_done_callback(told)
        for member in order.members:
            self._ours[member.id] = host
            self._watch(member)

    def stop_mesh(self, uid: int, members: Sequence[ProcessRef], timeout: float) -> Future[None]:
        """Stop processes that this one has launched or has had launched; ends when all have ended."""
        if uid in self._adopted:
            return self._adopted[uid]()
        here, hosts = self._launchers(members)
        ended = self._children.stop(members, timeout) if here else None
        if not hosts:
            return ended or Future.of(None)
        self._to_end.update(member.id for member in members)
        afar = self._requester.request_all(hosts, STOP_LAUNCHED, HANDED_DOWN * timeout, target=uid)
        return afar if ended is None else both(ended, afar)

    def kill_mesh(self, uid: int, members: Sequence[ProcessRef], verdict: str) -> None:
        """Kill processes that this one has launched or has had launched. Returns at once."""
        here, hosts = self._launchers(members)
        if here:
            self._children.kill([member.id for member in members], verdict)
        if hosts:
            self._to_end.update(member.id for member in members)
        for host in hosts:
            self._requester.request(host, KILL_LAUNCHED, verdict, target=uid)

    def give_up(self, process: ProcessRef, reason: str) -> None:
        """Have a process killed that was launched for this one and is lost to it; its launcher thinks it is alive.

        Others might still reach it, and wait for what it does not pass on. A process that has dialed this one has not
        said who launched it.
        """
        if (host := self._ours.get(process.id)) is not None:
            verdict = f"was killed because its owner's process has lost the connection to it: {reason}"
            self._requester.request(host, KILL_GIVEN_UP, (process.id, verdict))

    def _launchers(self, members: Sequence[ProcessRef]) -> tuple[bool, tuple[ProcessRef, ...]]:
        """Whether this process has launched some of these, and the other launchers: members may have been replaced."""
        launchers = {member.launcher.id: member.launcher for member in members if member.launcher is not None}
        here = launchers.pop(self._state.me.id, None)
        return here is not None, tuple(launchers.values())

    def let_go(self, hosts: Sequence[ProcessRef], timeout: float) -> Future[None]:
        """Have the job's processes on hosts end in good order; ends when all have ended."""
        self._to_end.update(host.id for host in hosts)
        return self._requester.request_all(tuple(hosts), EXIT, timeout)

    def is_ours(self, process_id: str) -> bool:
        """Whether a process was launched on another host for an actor of this process."""
        return process_id in self._ours

    def is_to_end(self, process_id: str) -> bool:
        """Whether the end of a process on another host was asked for here."""
        return process_id in self._to_end

    # On the host's side

    def _asked_to_launch(self, mail: Mail, order: LaunchOrder) -> Future[None]:
        """Launch processes of a mesh that is owned elsewhere.

        Raises:
            ValueError: they cannot be bound as asked for.
        """
        bindings = [CpuBinding.of(options) for options in order.proc_bind] or [CpuBinding()] * len(order.members)
        self._launched[mail.message.target] = mail.sender, order.members
        self._children.launch(order.members, order.env, order.bootstrap, bindings)
        for member in order.members:
            self._follow(member.id)
        return Future.of(None)

    def _asked_to_stop(self, mail: Mail, timeout: float) -> Future[None]:
        """Stop what was launched for a mesh."""
        uid = mail.message.target
        _, members = self._launched.get(uid, (None, ()))
        future = self._children.stop(members, timeout)
        future.add_done_callback(lambda _: self._launched.pop(uid, None))
        return future

    def _asked_to_kill(self, mail: Mail, verdict: str) -> Future[None]:
        """Kill what was launched for a mesh."""
        _, members = self._launched.get(mail.message.target, (None, ()))
        self._children.kill([member.id for member in members], verdict)
        return Future.of(None)

    def _asked_to_kill_one(self, mail: Mail, given_up: tuple[str, str]) -> Future[None]:
        """Kill a process that was launched for the requester."""
        process_id, verdict = given_up
        of_sender = [members for owner, members in list(self._launched.values()) if owner.id == mail.sender.id]
        if any(member.id == process_id for members in of_sender for member in members):
            self._children.kill([process_id], verdict)
        return Future.of(None)

    def _asked_for_address(self, mail: Mail, process_id: str) -> Future[str]:
        """The address of a process that is launched here: known once it is up. On any thread."""
        if not self._transport.is_elsewhere(mail.sender):
            return Future.of(within_host(process_id))
        future: Promise[str] = Promise()
        self._on_loop(self._tell, process_id, future)
        return future

    def _tell(self, process_id: str, promise: Promise[str]) -> None:
        link = self._transport.find(process_id)
        child = self._children.get(process_id)
        if link is not None and link.connected and port_of(link.peer.address):
            address = link.peer.address
            promise.set_result(address)
        elif (link is not None and link.lost is not None) or (child is not None and child.gone):
            promise.set_exception(SupervisionError("it has ended"))
        else:
            # This holds for an unknown process, too: the requester may have heard of it before it is launched here.
            self._asked.setdefault(process_id, []).append(promise)
            self._loop.call_later(self._state.settings.connect_timeout_s, self._give_up, process_id)

    def _give_up(self, process_id: str) -> None:
        for promise in self._asked.pop(process_id, ()):
            promise.set_exception(SupervisionError("its launcher does not know this process"))

    # Events, on the loop thread

    def connected(self, peer: ProcessRef) -> None:
        """Note that a link stands, whose other end has said its address."""
        for promise in self._asked.pop(peer.id, ()):
            promise.set_result(peer.address)

    def gone(self, peer: ProcessRef, reason: str) -> None:
        """End what the process had launched here, and the futures that wait for it."""
        self._to_end.discard(peer.id)
        self._ours.pop(peer.id, None)
        if (known := self._hosts.pop(peer.id, None)) is not None:
            known[1].set_result(reason)
        for promise in self._asked.pop(peer.id, ()):
            promise.set_exception(SupervisionError(reason))
        verdict = f"was killed because its owner's process is gone: {reason}"
        for uid, (owner, members) in list(self._launched.items()):
            if owner.id == peer.id:
                del self._launched[uid]
                self._children.kill([member.id for member in members], verdict)
        if peer.id == self._state.root.id and self._on_root_gone is not None:
            self._on_root_gone(reason)

    def _on_loop(self, callback: Callable[..., object], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)


def _copy(ended: Future[str], *, to: Promise[str]) -> None:
    to.settle_by(lambda: peek(ended))
