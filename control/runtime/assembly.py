"""`build_process`: the one place where the parts of a process' runtime are made and joined."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from skipper import trust
from skipper.control.model import settings as bounds
from skipper.control.model.future import Future
from skipper.control.runtime.actor_table import ActorTable
from skipper.control.runtime.cast.relays import Relays
from skipper.control.runtime.cast.sender import CastSender
from skipper.control.runtime.executor import with_own_thread
from skipper.control.runtime.flow_control import Flow
from skipper.control.runtime.history import FaultHistory
from skipper.control.runtime.join_members import JoinedProcesses
from skipper.control.runtime.messages import Mail
from skipper.control.runtime.messenger import Messenger
from skipper.control.runtime.ownership import Ownership
from skipper.control.runtime.peer_failures import PeerFailures
from skipper.control.runtime.ports import PortTable
from skipper.control.runtime.process import Process
from skipper.control.runtime.process_state import ProcessState
from skipper.control.runtime.procs.children import Children
from skipper.control.runtime.procs.ending import Ending, end_process
from skipper.control.runtime.procs.output_capture import Redirection
from skipper.control.runtime.procs.remote_launch import RemoteLaunch
from skipper.control.runtime.request_server import RequestServer
from skipper.control.runtime.requests import ADDRESS, EXIT, LINK, PING
from skipper.control.runtime.spawner import Spawner
from skipper.control.wire.addresses import host_of
from skipper.control.wire.bulk import Loans
from skipper.control.wire.certificates import Certificates
from skipper.control.wire.process_ref import ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.loop import LoopThread
    from skipper.control.runtime.messages import ActorRef
    from skipper.control.runtime.shared_parts import SharedParts

START_TIMEOUT_S = 30.0


def build_process(
    me: ProcessRef,
    root: ProcessRef,
    secret: bytes,
    loop_thread: LoopThread,
    certs: str | None = None,
    *,
    data_plane_is_open: bool = True,
    redirection: Redirection | None = None,
    leave: Callable[[float], None] | None = None,
    shared: SharedParts | None = None,
    extensions: Iterable[Callable[[Process], object]] = (),
) -> Process:
    """Build the runtime of one process, which can be reached and sends from then on.

    Args:
        me: this process.
        root: the script; the same as ``me`` there.
        secret: the job's secret.
        loop_thread: runs everything asynchronous.
        certs: the folder of the certificates for TLS with other hosts; None: none.
        data_plane_is_open: whether the data plane may be used with other hosts.
        redirection: where the processes that this one launches write their output; None: where this one does.
        leave: makes the main thread of a worker return (see `Ending`).
        shared: what it shares with other runtimes in this process of the operating system; None: it is alone.
        extensions: called with the process before it can be reached, so that the layers above can add requests.
    """
    from skipper.control.wire.sockets import Sockets
    from skipper.control.wire.transport import Transport

    trust.enter_job(secret)  # before any memory is registered: the data plane proves its handles by it
    settings = bounds.settings()
    state = ProcessState(
        me, root, secret, settings, certs, data_plane_is_open, secrets.randbits(63), redirection=redirection
    )
    loop = loop_thread.loop
    ports, loans, history = PortTable(), Loans(), FaultHistory()
    messenger = Messenger(state, ports, loans)
    requests = RequestServer(state, messenger)
    peer_failures = PeerFailures(state, loop, messenger, requests)

    def connected(peer: ProcessRef) -> None:
        children.connected(peer.id)
        remote_launch.connected(peer)

    def find_address(peer: ProcessRef) -> Future[str]:
        """Ask the launcher of a process on another host where that process listens."""
        return messenger.request(peer.launcher or state.root, ADDRESS, peer.id)

    def ask_to_end(child: ProcessRef, timeout: float) -> None:
        messenger.send(child, EXIT.message(timeout))

    transport = Transport(
        me,
        secret,
        loop,
        deliver=messenger.deliver,
        on_lost=peer_failures.link_lost,
        on_connected=connected,
        on_dial=peer_failures.watch,
        find_address=find_address,
        home=lambda: host_of(state.root.address),
        heartbeat_s=settings.heartbeat_s,
        unresponsive_s=settings.unresponsive(),
        connect_timeout_s=settings.connect_timeout_s,
        network=Sockets(me, secret, loop) if shared is None else shared.network_for(me, secret),
        script_id=root.id,
        certificates=None if certs is None else Certificates(certs),
    )
    flow = Flow(state, loop_thread, transport, messenger)
    actors = ActorTable(state, loop, flow, messenger, requests)
    relays = Relays(loop, messenger, actors, requests)
    casts = CastSender(state, loop, messenger, ports, transport, flow, relays, watch=peer_failures.watch)
    owners = Ownership(state, actors, messenger, requests, close_casts=casts.close)
    children = Children(
        loop,
        state,
        expect=transport.expect,
        on_end=peer_failures.child_ended,
        ask_to_end=ask_to_end,
        launcher=None if shared is None else shared.launcher,
    )
    remote_launch = RemoteLaunch(state, loop, messenger, transport, children, requests, watch=peer_failures.watch)
    members = JoinedProcesses(requests)
    end = end_process if shared is None else shared.end
    ending = Ending(
        state, loop_thread, transport, loans, actors, casts, children, owners, requests, leave=leave, end=end
    )
    executor_for = with_own_thread if shared is None else shared.executor_for
    Spawner(state, actors, flow, messenger, owners, history, requests, executor_for=executor_for)
    requests.serve(PING, lambda mail, _: Future.of(None))

    def link(mail: Mail, change: tuple[tuple[ActorRef, ...], tuple[ActorRef, ...]]) -> None:
        """Change what a port of this process is linked to."""
        ports.link(mail.message.target, mail.message.rank, *change, messenger)

    requests.serve(LINK, link)
    messenger.connect(
        transport=transport, flow=flow, casts=casts, actors=actors, requests=requests, peer_failures=peer_failures
    )
    peer_failures.connect(
        transport=transport,
        ports=ports,
        flow=flow,
        loans=loans,
        casts=casts,
        children=children,
        remote_launch=remote_launch,
        members=members,
        owners=owners,
        history=history,
    )
    process = Process(
        state=state,
        loop=loop,
        messenger=messenger,
        transport=transport,
        actors=actors,
        stops=actors.stops,
        flow=flow,
        loans=loans,
        casts=casts,
        requests=requests,
        members=members,
        owners=owners,
        ending=ending,
        peer_failures=peer_failures,
        children=children,
        remote_launch=remote_launch,
        history=history,
    )
    for extension in extensions:
        extension(process)
    loop_thread.run(transport.start(), timeout=START_TIMEOUT_S)
    state.me = transport.me
    messenger.note_address()
    return process
