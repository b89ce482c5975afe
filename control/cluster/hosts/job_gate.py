"""`JobGate`: where processes of other hosts join a job: over TCP, with a secret that all of these hosts have.

A script opens one for processes that join (`control.serve_job`), and rank 0 of `SpmdJob` and of ``initialize_spmd`` one
for its ranks. It sends a process that knows the secret what that needs to join the job, in the messages of `protocol`.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipper.control.api import join
from skipper.control.api.mesh import this_proc
from skipper.control.cluster.hosts import protocol
from skipper.control.cluster.hosts.agent_link import AgentLink
from skipper.control.cluster.hosts.attach import read_secret
from skipper.control.model.errors import (
    CertificateError,
    ControlError,
    HostError,
    HostUnreachableError,
    InsecureHostError,
    JobNotFoundError,
)
from skipper.control.model.settings import Settings
from skipper.control.runtime.data_plane_access import open_data_plane
from skipper.control.runtime.join_file import Beyond, Connection
from skipper.control.runtime.process import Process
from skipper.control.runtime.requests import JOIN
from skipper.control.wire import addresses
from skipper.control.wire.certificates import SECRET, Certificates
from skipper.control.wire.identity import MEMBERS, Role
from skipper.control.wire.link import Link
from skipper.control.wire.messages import Message, ProcessRequest
from skipper.control.wire.process_ref import ProcessRef

_HANG_UP_S = 5.0


@dataclass(frozen=True, slots=True)
class GateAddress:
    """Where processes of other hosts join, and what both sides need for it.

    Attributes:
        host: the IP of the process that opens the job.
        port: where it listens; 0 before that: any port.
        secret: the secret that all hosts have.
        certs: the folder of the certificates for TLS; None: no TLS.
        data_plane: whether the data plane may carry data between hosts; the opening side decides.
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
        data_plane: bool | None = None,
    ) -> GateAddress:
        """The gate that these options describe, which are those of `attach_to_hosts`.

        Raises:
            ValueError: there is no secret, or the address is not valid; and, as in `attach_to_hosts`, for certificates,
                secrets and insecure links.
        """
        host, port = addresses.parse(address)
        if secret_file is None and certs is None:
            raise ValueError(
                "processes of several hosts need a common secret: pass secret_file= (skipper host secret makes one, "
                "which is copied to all hosts), or certs= with a file named secret"
            )
        if certs is None and not insecure and not addresses.is_loopback(host):
            raise InsecureHostError(
                f"{host} is on a network: pass certs= for TLS, or insecure=True if you trust the whole network"
            )
        folder = None if certs is None else os.path.abspath(certs)
        if folder is not None:
            Certificates(folder)
        secret = read_secret(Path(secret_file) if secret_file is not None else Path(folder or "") / SECRET)
        return GateAddress(host, port, secret, folder, (certs is None) if data_plane is None else data_plane)

    @property
    def certificates(self) -> Certificates | None:
        """The certificates for TLS; None: no TLS."""
        return None if self.certs is None else Certificates(self.certs)

    def __repr__(self) -> str:
        return f"<GateAddress {addresses.at(self.host, self.port)}>"  # never the secret


class JobGate:
    """The opening side: admits processes of other hosts until it is closed. Its process listens beyond its host.

    Args:
        process: the script's process.
        gate: where to listen.
        run: what the admitted processes have in common; empty: only the secret.
        who: the script, for people.

    Raises:
        WireError: it cannot listen on the address.
        CertificateError: the certificates are not a script's, or the job uses other ones already.
    """

    def __init__(self, process: Process, gate: GateAddress, run: str, *, who: str = "rank 0") -> None:
        from skipper.control.wire.auth_listener import AuthListener

        self._process, self._gate, self._run, self._who = process, gate, run, who
        self._links: set[Link] = set()
        self._gone = threading.Event()
        certificates = gate.certificates
        if certificates is not None:
            certificates.require(Role.SCRIPT, who)
        if not addresses.host_of(process.me.address):
            process.listen_beyond(gate.host, gate.certs, data_plane_is_open=gate.data_plane)
            if gate.data_plane:
                open_data_plane(gate.host)
        elif process.state.certs != gate.certs:
            raise CertificateError(
                "this job already uses other certificates, or none: open it to all hosts with the same certs="
            )
        place = addresses.at(gate.host, gate.port)
        self._auth_listener = AuthListener(
            [(place, certificates)],
            protocol.AGENT,
            gate.secret,
            on_proven=self._came,
            on_closed=self._gone.set,
            roles=MEMBERS,
        )
        self.address = addresses.at(gate.host, self._auth_listener.ports[0])
        """``IP:PORT``, with a free port if that of the gate is 0."""

    def close(self) -> None:
        """Admit nobody any more; idempotent."""
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
        protocol.check_versions(asked["versions"], self._who)
        if asked["run"] != self._run:
            raise HostUnreachableError(f"the {self._who} of another run listens there")
        process, nonce = self._process, protocol.new_nonce()
        return {
            "root": {"id": process.me.id, "address": process.me.address, "name": process.me.name},
            "nonce": nonce.hex(),
            "masked_secret": protocol.mask(process.secret, self._gate.secret, nonce).hex(),
            "settings": dataclasses.asdict(process.settings),
            "data_plane": process.state.data_plane_is_open,
        }


def ask_gate(gate: GateAddress, run: str, *, timeout: float) -> Connection:
    """Ask a gate how to join its job from here; blocks.

    Raises:
        HostUnreachableError: no process listens there, or one of another run does.
        HostMismatchError: the other side runs other versions.
        HostError: this version does not know its answer.
        AuthenticationError: it has another secret, or one side does not accept the other's certificate.
    """
    certificates = gate.certificates
    if certificates is not None and certificates.identity.role not in MEMBERS:
        certificates.require(Role.HOST, "a process that joins")
    asked, deadline = {"versions": protocol.versions(), "run": run}, time.monotonic() + timeout
    with AgentLink(
        gate.host, gate.port, gate.secret, certificates, timeout=timeout, role=Role.SCRIPT, who="script"
    ) as link:
        return introduced(link.ask("come", asked, timeout=max(deadline - time.monotonic(), 0)), gate)


def introduced(there: Mapping[str, Any], gate: GateAddress) -> Connection:
    """The answer of a gate.

    Raises:
        HostError: it is not an answer of a gate.
    """
    try:
        root = ProcessRef(str(there["root"]["id"]), str(there["root"]["address"]), str(there["root"]["name"]))
        nonce, masked = bytes.fromhex(there["nonce"]), bytes.fromhex(there["masked_secret"])
        plain = dict(there["settings"])
        settings = Settings(**plain | {"preload": plain["preload"] and tuple(plain["preload"])})  # JSON has no tuples
        if not addresses.port_of(root.address):
            raise ValueError("the script listens at no address")
        secret = protocol.mask(masked, gate.secret, nonce)
        is_open = bool(there["data_plane"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise HostError(f"{gate!r} runs another version of the protocol: {type(error).__name__}") from None
    own = addresses.own_address_towards(gate.host)
    beyond = Beyond(own, gate.certs, data_plane=is_open)
    return Connection(f"at {addresses.at(gate.host, gate.port)}", root, secret, settings, "", gate.host, beyond)


def enter_by_gate(gate: GateAddress, run: str, name: str, *, timeout: float) -> Process:
    """Become a process of a job on another host; it listens on the IP that this host uses to reach that one.

    Args:
        gate: of the job.
        run: what the joining processes have in common.
        name: of this process, for people.
        timeout: in seconds, for each of two steps.

    Raises:
        HostUnreachableError: no process listens there, or one of another run does.
        HostMismatchError: the other side runs other versions.
        AuthenticationError: it has another secret.
        JobNotFoundError: the job has ended.
        DeadlineError: it did not answer in time.
    """
    connection = ask_gate(gate, run, timeout=timeout)
    return join.enter(
        connection, name, lambda process: process.request(connection.root, JOIN, this_proc()), timeout=timeout
    )


class RemoteJobs:
    """What `control.serve_job` and `control.join` do beyond this host; they are in a lower layer and get this."""

    def open(
        self,
        process: Process,
        address: str,
        secret_file: str | os.PathLike[str] | None,
        certs: str | os.PathLike[str] | None,
        *,
        insecure: bool,
        data_plane: bool | None,
    ) -> JobGate:
        """Open the job of a script."""
        gate = GateAddress.of(_own(address), secret_file, certs, insecure=insecure, data_plane=data_plane)
        return JobGate(process, gate, "", who="the script")

    def find(
        self,
        address: str,
        secret_file: str | os.PathLike[str] | None,
        certs: str | os.PathLike[str] | None,
        *,
        insecure: bool,
        timeout: float,
    ) -> Connection:
        """How to join the job at an address.

        Raises:
            JobNotFoundError: no job is served there.
        """
        gate = GateAddress.of(address, secret_file, certs, insecure=insecure)
        try:
            return ask_gate(gate, "", timeout=timeout)
        except HostUnreachableError as error:
            raise JobNotFoundError(f"there is no job to join at {address}: {error}") from error


def _own(address: str) -> str:
    """The address, with the IP in place of a network device's name."""
    host, _, port = address.removeprefix(addresses.SCHEME).rpartition(":")
    ip = addresses.address_of_device(host) if host else None
    return f"{addresses.SCHEME}{addresses.at(ip, int(port))}" if ip is not None and port.isdecimal() else address
