"""How ranks on other nodes join the job of rank 0: by TCP, with a secret that all nodes have.

Rank 0 listens at an address that all ranks know, until all ranks have joined. It tells a rank that knows the secret
what the rank needs to become a process of the job, in the messages of `control.cluster.hosts.protocol`.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipper.control.api.mesh import this_proc
from skipper.control.cluster.hosts import protocol
from skipper.control.cluster.hosts.agent_link import AgentLink
from skipper.control.cluster.hosts.attach import open_data_plane, read_secret
from skipper.control.model.errors import ControlError, HostError, HostUnreachableError, InsecureHostError
from skipper.control.model.settings import Settings
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.process import Process
from skipper.control.runtime.requests import JOIN
from skipper.control.wire import addresses
from skipper.control.wire.certificates import SECRET, Certificates
from skipper.control.wire.identity import MEMBERS, Role
from skipper.control.wire.link import Link
from skipper.control.wire.messages import Message, ProcessRequest
from skipper.control.wire.process_ref import ProcessRef

PORT = 7432
"""The port at which rank 0 listens by default."""

_HANG_UP_S = 5.0


@dataclass(frozen=True, slots=True)
class RendezvousAddress:
    """Where the ranks of several nodes meet, and what they need for it.

    Attributes:
        host: the IP of rank 0.
        port: where it listens.
        secret: the one that all nodes have.
        certs: the folder of the certificates for TLS; None: none.
        data_plane: whether the data plane may carry data between nodes.
    """

    host: str
    port: int
    secret: bytes
    certs: str | None
    data_plane: bool

    @staticmethod
    def of(
        address: str,
        secret_file: str | os.PathLike[str] | None,
        certs: str | os.PathLike[str] | None,
        *,
        insecure: bool,
        data_plane: bool | None,
    ) -> RendezvousAddress:
        """The rendezvous that these options describe, which are those of `attach_to_hosts`.

        Raises:
            ValueError: there is no secret, or that is no address; also what `attach_to_hosts` says of certificates,
                secrets and insecure links.
        """
        host, port = addresses.parse(address)
        if secret_file is None and certs is None:
            raise ValueError(
                "ranks of several nodes meet by a secret: pass secret_file= (skipper host secret makes one, which is "
                "copied to all nodes), or certs= with a file named secret"
            )
        if certs is None and not insecure and not addresses.is_loopback(host):
            raise InsecureHostError(
                f"{host} is reached over a network: pass certs= for TLS, or insecure=True where all of it is trusted"
            )
        folder = None if certs is None else os.path.abspath(certs)
        if folder is not None:
            Certificates(folder)
        secret = read_secret(Path(secret_file) if secret_file is not None else Path(folder or "") / SECRET)
        return RendezvousAddress(host, port, secret, folder, (certs is None) if data_plane is None else data_plane)

    @property
    def certificates(self) -> Certificates | None:
        """For TLS; None: none."""
        return None if self.certs is None else Certificates(self.certs)

    def __repr__(self) -> str:
        return f"<RendezvousAddress {addresses.at(self.host, self.port)}>"  # never the secret


class SpmdRendezvousServer:
    """Rank 0's side: lets the ranks of one run in until it is closed. From then on the process listens beyond its host.

    Args:
        process: rank 0's.
        rendezvous: where.
        run: what the ranks of this run have in common.

    Raises:
        WireError: the address cannot be listened on.
    """

    def __init__(self, process: Process, rendezvous: RendezvousAddress, run: str) -> None:
        from skipper.control.wire.auth_listener import AuthListener

        self._process, self._rendezvous, self._run = process, rendezvous, run
        self._links: set[Link] = set()
        self._gone = threading.Event()
        certificates = rendezvous.certificates
        if certificates is not None:
            certificates.require(Role.SCRIPT, "rank 0")
        if not addresses.host_of(process.me.address):
            process.listen_beyond(rendezvous.host, rendezvous.certs, data_plane_is_open=rendezvous.data_plane)
            if rendezvous.data_plane:
                open_data_plane(rendezvous.host)
        place = addresses.at(rendezvous.host, rendezvous.port)
        self._auth_listener = AuthListener(
            [(place, certificates)],
            protocol.AGENT,
            rendezvous.secret,
            on_proven=self._came,
            on_closed=self._gone.set,
            roles=MEMBERS,
        )
        self.address = addresses.at(rendezvous.host, self._auth_listener.ports[0])
        """``IP:PORT``, where the port is one that is free if that of the rendezvous is 0."""

    def close(self) -> None:
        """Let no more ranks in; idempotent."""
        self._auth_listener.close()
        if not self._gone.wait(_HANG_UP_S):
            self._auth_listener.cut()
            self._gone.wait(_HANG_UP_S)

    # On the listener's thread

    def _came(self, guest: Any, peer: ProcessRef) -> None:
        from skipper.control.wire.handshake import WELCOME

        link = Link(peer, lambda _, message: self._asked(link, message), self._hung_up)
        self._links.add(link)
        link.connected = True
        link.open(guest.stream, greeting=WELCOME)

    def _hung_up(self, link: Link, reason: str) -> None:
        link.lose(reason)
        self._links.discard(link)

    def _asked(self, link: Link, request: Message) -> None:
        if not isinstance(request, ProcessRequest) or request.method != "come":
            return
        try:
            link.post(protocol.answer(request.reply_to, self._introduction(protocol.read(request))))
        except ControlError as error:
            link.post(protocol.refusal(request.reply_to, error))
        except (KeyError, TypeError, ValueError) as error:
            link.post(protocol.refusal(request.reply_to, HostError(f"{type(error).__name__}: {error}")))

    def _introduction(self, asked: dict[str, Any]) -> dict[str, Any]:
        protocol.check_versions(asked["versions"], "rank 0")
        if asked["run"] != self._run:
            raise HostUnreachableError("rank 0 of another run listens there")
        process, nonce = self._process, protocol.new_nonce()
        return {
            "root": {"id": process.me.id, "address": process.me.address, "name": process.me.name},
            "nonce": nonce.hex(),
            "masked_secret": protocol.mask(process.secret, self._rendezvous.secret, nonce).hex(),
            "settings": dataclasses.asdict(process.settings),
            "data_plane": self._rendezvous.data_plane,
        }


def join_rendezvous(rendezvous: RendezvousAddress, run: str, name: str, *, timeout: float) -> Process:
    """Become a process of rank 0's job, one that listens at the IP that this node has on the way to rank 0.

    Args:
        rendezvous: where rank 0 listens.
        run: what the ranks of this run have in common.
        name: of this process, for people.
        timeout: in seconds.

    Raises:
        HostUnreachableError: rank 0 does not listen there, or one of another run does.
        HostMismatchError: rank 0 runs other versions.
        AuthenticationError: rank 0 has another secret.
    """
    asked = {"versions": protocol.versions(), "run": run}
    certificates = rendezvous.certificates
    if certificates is not None and certificates.identity.role not in MEMBERS:
        certificates.require(Role.HOST, "a rank")
    with AgentLink(
        rendezvous.host, rendezvous.port, rendezvous.secret, certificates, timeout=timeout, role=Role.SCRIPT
    ) as link:
        there = link.ask("come", asked, timeout=timeout)
    root = ProcessRef(there["root"]["id"], there["root"]["address"], there["root"]["name"])
    secret = protocol.mask(bytes.fromhex(there["masked_secret"]), rendezvous.secret, bytes.fromhex(there["nonce"]))
    own = addresses.own_address_towards(rendezvous.host)
    is_open = bool(there["data_plane"])
    if is_open:
        open_data_plane(own)
    settings = Settings(**there["settings"])
    process = runtime.start_joined(
        root, secret, settings, name, host=own, certs=rendezvous.certs, data_plane_is_open=is_open
    )
    try:
        process.request(root, JOIN, this_proc()).get(timeout)
    except BaseException:
        runtime.shutdown(grace_s=0)
        raise
    return process
