"""`Process`: the runtime of this process as the layers above see it; `control.runtime.assembly` builds it."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skipper.control.model.settings import Settings
from skipper.control.runtime.supervision import RootActor
from skipper.control.wire.process_ref import ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.actor_table import ActorTable
    from skipper.control.runtime.cast.sender import CastSender
    from skipper.control.runtime.flow_control import Flow
    from skipper.control.runtime.history import FaultHistory
    from skipper.control.runtime.join_members import JoinedProcesses
    from skipper.control.runtime.messenger import Messenger
    from skipper.control.runtime.ownership import Ownership
    from skipper.control.runtime.peer_failures import PeerFailures
    from skipper.control.runtime.process_state import ProcessState
    from skipper.control.runtime.procs.children import Children
    from skipper.control.runtime.procs.ending import Ending
    from skipper.control.runtime.procs.remote_launch import RemoteLaunch
    from skipper.control.runtime.request_server import RequestServer
    from skipper.control.runtime.stops import Stops
    from skipper.control.wire.bulk import Loans
    from skipper.control.wire.transport import Transport


@dataclass(kw_only=True, eq=False, repr=False)
class Process:
    """One process of a job: its transport, its actors, its open ports and its children.

    It has the sending methods of its `Messenger` as its own.

    Attributes:
        state: what it knows of itself; its parts share this.
        loop: the event loop for everything asynchronous.
        messenger: sends its messages.
        transport: the links to other processes.
        actors: the actors of this process.
        stops: when actors that are stopping have to end.
        flow: back-pressure.
        loans: large segments that others may still read.
        casts: casts to many.
        requests: serves requests to this process, besides calls.
        members: the processes that have joined.
        owners: who owns what.
        ending: ends the runtime.
        peer_failures: the ends of other processes.
        children: the processes launched here.
        remote_launch: launching for others, and by others.
        history: what has gone wrong.
        root_actor: the script, if this process is a script's, or has joined; None in a process of an actor.
        ports: where answers arrive.
    """

    state: ProcessState
    loop: asyncio.AbstractEventLoop
    messenger: Messenger
    transport: Transport
    actors: ActorTable
    stops: Stops
    flow: Flow
    loans: Loans
    casts: CastSender
    requests: RequestServer
    members: JoinedProcesses
    owners: Ownership
    ending: Ending
    peer_failures: PeerFailures
    children: Children
    remote_launch: RemoteLaunch
    history: FaultHistory
    root_actor: RootActor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.ports = self.messenger.ports
        self._take_methods()

    def _take_methods(self) -> None:
        messenger = self.messenger
        self.send = messenger.send
        self.cast = messenger.cast
        self.reply_to = messenger.reply_to
        self.send_to_port = messenger.send_to_port
        self.request = messenger.request
        self.request_all = messenger.request_all

    # What it knows of itself

    @property
    def me(self) -> ProcessRef:
        """This process."""
        return self.state.me

    @property
    def root(self) -> ProcessRef:
        """The script; the same as `me` there."""
        return self.state.root

    @property
    def secret(self) -> bytes:
        """The job's secret."""
        return self.state.secret

    @property
    def settings(self) -> Settings:
        """The bounds that hold for what this process does."""
        return self.state.settings

    @property
    def closing(self) -> bool:
        """Whether it ends."""
        return self.state.closing

    def running(self) -> list[str]:
        """The names of the processes that this one has launched, and of the job's processes on other hosts."""
        children = [child.ref.name for child in self.children.alive()]
        return [*children, *(host.name for host in self.remote_launch.hosts())]

    # What changes

    def take_over(self, settings: Settings) -> None:
        """Apply bounds to what this process does from now on; the heartbeat belongs to the job and stays."""
        settings = dataclasses.replace(settings, heartbeat_s=self.state.settings.heartbeat_s)
        self.state.settings = settings
        self.flow.take_over(settings)

    def own_as(self, root: RootActor) -> None:
        """Make a script, which nobody owns, the owner of what this process spawns."""
        self.root_actor = root
        self.owners.take_root(root)

    def listen_beyond(self, host: str, certs: str | None, *, data_plane_is_open: bool) -> None:
        """Let processes of other hosts reach this one, the script's process, at an IP of its host.

        Args:
            host: the IP.
            certs: the folder of the certificates for TLS; None: none.
            data_plane_is_open: whether the data plane may be used with those hosts.

        Raises:
            WireError: the process cannot listen there.
            CertificateError: the folder does not hold what TLS needs.
        """
        from skipper.control.wire.certificates import Certificates

        self.transport.listen_beyond(host, None if certs is None else Certificates(certs))
        self.state.certs = certs
        self.state.data_plane_is_open = data_plane_is_open
        self.state.me = self.state.root = self.transport.me
        self.messenger.note_address()
        if self.root_actor is not None:
            self.root_actor.note_address()

    def fall_silent(self) -> None:
        """Send nothing any more: this is a forked copy, and the connections belong to the original."""
        self.messenger.fall_silent()
        self._take_methods()
