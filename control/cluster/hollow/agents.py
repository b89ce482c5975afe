"""`HollowAgents`: the agents of many hollow hosts, served by one listener. They answer like `HostAgent`."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skipper import trust
from skipper.control.api.mesh import HOST_NAME
from skipper.control.cluster.hollow.process import KILLED, HollowProcess
from skipper.control.cluster.hosts import protocol
from skipper.control.cluster.hosts.member import part_in_job
from skipper.control.model import settings as bounds
from skipper.control.model.errors import ControlError, HostError
from skipper.control.wire import addresses, grpc_poller
from skipper.control.wire.identity import Role
from skipper.control.wire.link import Link
from skipper.control.wire.messages import Message, ProcessRequest
from skipper.control.wire.process_ref import JUDGED, ProcessRef

if TYPE_CHECKING:
    from skipper.control.cluster.hollow.ground import Ground

_CLOSE_TIMEOUT_S = 5.0


@dataclass(slots=True, eq=False)
class HollowHost:
    """One host.

    Attributes:
        address: of its agent, ``IP:PORT``.
        link: to the script that has attached it; None: it is not attached.
        member: the job's process there; None if there is none.
        silence_s: how long the script may be silent.
    """

    address: str
    link: Link | None = None
    member: HollowProcess | None = None
    silence_s: float = 0.0


class HollowAgents:
    """The agents of some hosts; one job at a time may attach these.

    Args:
        ground: the shared threads of their processes.
        ips: of each host.
        secret: the secret that scripts have to know.

    Raises:
        WireError: it cannot listen on an IP.
    """

    def __init__(self, ground: Ground, ips: Sequence[str], secret: bytes) -> None:
        grpc_poller.choose()
        from skipper.control.wire.auth_listener import AuthListener

        self._ground = ground
        self._secret = secret
        self._job: bytes | None = None
        """The secret of the job that has attached some of the hosts."""
        self._links: set[Link] = set()
        self._gone = threading.Event()
        self._listener = AuthListener(
            [(addresses.at(ip, 0), None) for ip in ips],
            protocol.AGENT,
            secret,
            on_proven=self._came,
            on_closed=self._gone.set,
            roles=(Role.SCRIPT,),
        )
        self.hosts = [HollowHost(addresses.at(ip, port)) for ip, port in zip(ips, self._listener.ports, strict=True)]
        self._by_address = {host.address: host for host in self.hosts}

    def kill(self, host: HollowHost) -> None:
        """Make a host vanish, as in a power cut: its agent, and all processes. It can be attached again."""
        link, host.link = host.link, None
        if host.member is not None:
            host.member.kill()
        if link is not None:
            self._hang_up(link)

    def look_for_life(self) -> None:
        """End the processes of scripts that show no sign of life."""
        now = time.monotonic()
        for host in self.hosts:
            if host.link is not None and now - host.link.last_heard_s > JUDGED * host.silence_s:
                self._ground.soon(lambda host=host: self.kill(host))  # type: ignore[misc]

    def close(self) -> None:
        """End everything; returns when nothing is left of it."""
        for host in self.hosts:
            self.kill(host)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        while self._ground.living and time.monotonic() < deadline:
            time.sleep(0.01)
        self._listener.close()
        if not self._gone.wait(0.5):
            self._listener.cut()
            self._gone.wait(_CLOSE_TIMEOUT_S)

    # On the listener's thread

    def _came(self, guest: Any, peer: ProcessRef) -> None:
        from skipper.control.wire.handshake import WELCOME

        def deliver(_: ProcessRef, message: Message) -> None:
            self._ground.soon(lambda: self._ask(link, message))

        link = Link(peer, deliver, lambda link, _: self._ground.soon(lambda: self._hung_up(link)))
        link.connected = True
        self._links.add(link)
        link.open(guest.stream, greeting=WELCOME)

    # On the thread that starts processes

    def _hang_up(self, link: Link) -> None:
        self._links.discard(link)
        link.lose("the host is gone")

    def _hung_up(self, link: Link) -> None:
        self._hang_up(link)
        for host in self.hosts:
            if host.link is link:
                self.kill(host)

    def _ask(self, link: Link, request: Message) -> None:
        if link.lost is not None or not isinstance(request, ProcessRequest):
            return
        try:
            if request.method != "attach":
                raise HostError(f"a hollow host does not know the request {request.method!r}")
            address = self._attach(link, protocol.read(request))
            link.post(protocol.answer(request.reply_to, {"address": address}))
        except ControlError as error:
            link.post(protocol.refusal(request.reply_to, error))
        except (KeyError, TypeError, ValueError, OSError) as error:
            refusal = HostError(f"the request {request.method!r} failed: {type(error).__name__}: {error}")
            link.post(protocol.refusal(request.reply_to, refusal))

    def _attach(self, link: Link, content: dict[str, Any]) -> str:
        """Make the job's process on the dialed host; returns where it listens.

        Raises:
            HostError: the host is attached already, or another job has attached hosts in this process.
            HostMismatchError: the script runs other versions.
        """
        host = self._by_address[str(content["me"]["name"]).removeprefix(HOST_NAME)]
        protocol.check_versions(content["versions"], f"the host {host.address}")
        secret = protocol.mask(bytes.fromhex(content["masked_secret"]), self._secret, bytes.fromhex(content["nonce"]))
        if host.member is not None:
            raise HostError(f"the hollow host {host.address} is attached already")
        if self._job not in (None, secret):
            raise HostError(f"the hollow host {host.address} shares its process with hosts of another job")
        me, root, settings = part_in_job(content)
        if addresses.host_of(root.address) == addresses.host_of(me.address):  # other hosts need not reach it
            me = dataclasses.replace(me, address=addresses.within_host(me.id))
        self._job = secret
        bounds.adopt(settings)
        host.link, host.silence_s = link, settings.unresponsive()
        member = host.member = HollowProcess(self._ground, me, root, secret, lambda _: self._ended(host))
        member.runtime.transport.expect(root)
        member.runtime.remote_launch.stand_for_job(lambda _: member.kill(KILLED))
        return member.runtime.me.address

    def _ended(self, host: HollowHost) -> None:
        host.member = None
        if self._job is not None and all(each.member is None for each in self.hosts):
            self._job = None
            gc.unfreeze()
            trust.leave_job()
