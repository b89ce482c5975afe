"""`Process`: the runtime of this process as the layers above see it; `control.runtime.assembly` builds it."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

from skipper.control.model.settings import Settings
from skipper.control.runtime.procs.output_capture import Redirection
from skipper.control.runtime.supervision import RootActor
from skipper.control.wire.envelope import ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.actor_table import ActorTable
    from skipper.control.runtime.cast.sender import CastSender
    from skipper.control.runtime.flow_control import Flow
    from skipper.control.runtime.history import History
    from skipper.control.runtime.join_members import Members
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


class Process:
    """One process of a job: its transport, its actors, its open ports and its children.

    What it sends it sends by the methods of its `Messenger`, which are its own, too.

    Attributes:
        state: what it knows of itself, which its parts share.
        root_actor: the script, where this process is a script's, or has joined; None in a process of an actor.
        loop: the event loop of everything asynchronous.
        transport: the links to other processes.
        ports: where answers arrive.
        actors: those of this process.
        stops: by when those of them have to end that do.
        flow: back-pressure.
        loans: large segments that others may still read.
        casts: casts to many.
        requests: what this process is asked for beside calls.
        members: the processes that have joined.
        owners: who owns what.
        ending: how all this ends.
        peer_failures: the ends of other processes.
        children: the processes launched here.
        remote_launch: launching for others, and by others.
        history: what has gone wrong.
    """

    def __init__(
        self,
        *,
        state: ProcessState,
        loop: asyncio.AbstractEventLoop,
        messenger: Messenger,
        transport: Transport,
        actors: ActorTable,
        stops: Stops,
        flow: Flow,
        loans: Loans,
        casts: CastSender,
        requests: RequestServer,
        members: Members,
        owners: Ownership,
        ending: Ending,
        peer_failures: PeerFailures,
        children: Children,
        remote_launch: RemoteLaunch,
        history: History,
    ) -> None:
        self.root_actor: RootActor | None = None
        self.loop = loop
        self.transport = transport
        self.ports = messenger.ports
        self.actors = actors
        self.stops = stops
        self.flow = flow
        self.loans = loans
        self.casts = casts
        self.requests = requests
        self.members = members
        self.owners = owners
        self.ending = ending
        self.peer_failures = peer_failures
        self.children = children
        self.remote_launch = remote_launch
        self.history = history
        self.state = state
        self._messenger = messenger
        self._take_methods()

    def _take_methods(self) -> None:
        messenger = self._messenger
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
    def certs(self) -> str | None:
        """The folder of the certificates for TLS with other hosts; None: none."""
        return self.state.certs

    @property
    def data_plane_is_open(self) -> bool:
        """Whether the data plane may be used with other hosts."""
        return self.state.data_plane_is_open

    @property
    def settings(self) -> Settings:
        """The bounds that hold for what this process does."""
        return self.state.settings

    @property
    def uid(self) -> int:
        """The number of this process among its actors."""
        return self.state.uid

    @property
    def closing(self) -> bool:
        """Whether it ends."""
        return self.state.closing

    @property
    def redirection(self) -> Redirection | None:
        """Where the processes that this one launches write to; None: to where this one does."""
        return self.state.redirection

    def redirect(self, redirection: Redirection) -> None:
        """Have the processes that are launched from now on write somewhere else."""
        self.state.redirection = redirection

    def running(self) -> list[str]:
        """The names of the processes that this one has launched, and that stand for its job on other hosts."""
        children = [child.ref.name for child in self.children.alive()]
        return [*children, *(host.name for host in self.remote_launch.hosts())]

    # What changes

    def take_over(self, settings: Settings) -> None:
        """Have bounds hold for what this process does from now on; the heartbeat is the job's and stays."""
        settings = dataclasses.replace(settings, heartbeat_s=self.state.settings.heartbeat_s)
        self.state.settings = settings
        self.flow.take_over(settings)

    def own_as(self, root: RootActor) -> None:
        """Have what this process spawns be owned by a script, with nobody above it."""
        self.root_actor = root
        self.owners.take_root(root)

    def listen_beyond(self, host: str, certs: str | None, *, data_plane_is_open: bool) -> None:
        """Let processes of other hosts reach this one, which is the script's, at an IP of its host.

        Args:
            host: the IP.
            certs: the folder of the certificates for TLS; None: none.
            data_plane_is_open: whether the data plane may be used with them.

        Raises:
            WireError: it cannot be listened on.
            CertificateError: the folder does not hold what TLS needs.
        """
        from skipper.control.wire.certificates import Certificates

        self.transport.listen_beyond(host, None if certs is None else Certificates(certs))
        self.state.certs = certs
        self.state.data_plane_is_open = data_plane_is_open
        self.state.me = self.state.root = self.transport.me
        self._messenger.note_address()
        if self.root_actor is not None:
            self.root_actor.note_address()

    def fall_silent(self) -> None:
        """Send nothing any more: this is a forked copy, and the connections are those of the original."""
        self._messenger.fall_silent()
        self._take_methods()
