"""How the ranks of a launcher become processes of one job: rank 0 opens it, the others find it and join.

Ranks of one host find a connection file in the user's own folder, and nothing listens on a port. For ranks of several
hosts rank 0 listens at one IP, its gate, and they prove that they know a secret. If ``torch.distributed`` or torchrun's
agent has a store, rank 0 writes the file's path or the address there; neither is a secret, and forging it gains
nothing. Otherwise all ranks derive both from the variables of the launcher.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist

from skipper import control
from skipper.control import DeadlineError, HostUnreachableError, JobNotFoundError, RemoteHostError
from skipper.control.api.join import CERTS_VARIABLE, INSECURE_VARIABLE, insecure_by_environment
from skipper.control.runtime import current_runtime as runtime
from skipper.control.wire import addresses
from skipper.torchstore.errors import StoreRendezvousError, StoreTimeoutError
from skipper.torchstore.spmd.ranks import Launch
from skipper.trust import SECRET_VARIABLE

if TYPE_CHECKING:  # importing it imports gRPC, and then processes of a mesh cannot be forked from a warm one
    from skipper.control.cluster.hosts.job_gate import GateAddress

_AGENT_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
_PREFIX = "skipper/spmd"
_LOOK_S = 0.05
_CONNECT_S = 10.0
_ELSEWHERE = "192.0.2.1"
"""An unused address (RFC 5737): the route to it is the route to other networks. Nothing is sent there."""


@dataclass(frozen=True, slots=True)
class Trust:
    """How ranks of several hosts connect to and authenticate each other; see `initialize_spmd`.

    Attributes:
        address: Where rank 0 listens, ``tcp://HOST:PORT``; None: at MASTER_ADDR.
        secret_file: The file with the secret.
        certs: The folder with the certificates.
        insecure: Whether to use no TLS.
        data_plane: Whether the data plane may carry data between hosts; None: only if there is no TLS.
    """

    address: str | None = None
    secret_file: str | os.PathLike[str] | None = None
    certs: str | os.PathLike[str] | None = None
    insecure: bool = False
    data_plane: bool | None = None

    def completed(self) -> Trust:
        """The same, with arguments that were not passed taken from the environment.

        Raises:
            ValueError: A variable of the environment means neither yes nor no.
        """
        trust = dataclasses.replace(self, insecure=self.insecure or insecure_by_environment())
        if self.secret_file is not None or self.certs is not None:
            return trust
        certs, secret_file = os.environ.get(CERTS_VARIABLE), os.environ.get(SECRET_VARIABLE)
        return dataclasses.replace(trust, certs=certs or None, secret_file=None if certs else secret_file or None)

    def means_several_hosts(self, launch: Launch) -> bool:
        """Whether these ranks meet at a gate; otherwise they are assumed to be on one host."""
        if self.address is not None:
            return True
        if launch.is_one_host or (self.secret_file is None and self.certs is None):
            return False
        if launch.is_one_host is None:
            # A secret may be in the environment for other reasons: without TLS, it alone is not enough.
            return (self.certs is not None or self.insecure) and not _is_at_loopback(launch.master_addr)
        return True

    def gate(self, address: str) -> GateAddress:
        """The gate for an address.

        Raises:
            ValueError: See `initialize_spmd`.
        """
        from skipper.control.cluster.hosts import job_gate

        return job_gate.GateAddress.of(
            address, self.secret_file, self.certs, insecure=self.insecure, data_plane=self.data_plane
        )


@dataclass(slots=True)
class OpenedJob:
    """The job of rank 0, open to the other ranks; a context manager.

    Attributes:
        gate: The gate for ranks of other hosts, with the actual port; None: there is only one host.
        run: The name that the ranks have in common.
    """

    gate: GateAddress | None
    run: str
    _closes: list[Callable[[], object]]

    def close(self) -> None:
        """Admit no more ranks; idempotent."""
        while self._closes:
            self._closes.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class EnteredJob:
    """How a rank joined the job.

    Attributes:
        gate: The gate through which it joined; None: it is on rank 0's host.
        run: The name that the ranks have in common.
        has_joined: Whether this process was in no job before.
    """

    gate: GateAddress | None
    run: str
    has_joined: bool


def open_job(launch: Launch, trust: Trust, store_name: str, deadline: float) -> OpenedJob:
    """Open the job of this process, rank 0, to the other ranks. Blocks only for a call of a local store.

    Raises:
        AlreadyInJobError: (control's) this process is part of another job.
        JobExistsError: (control's) the ranks of another run with the same variables are about to meet.
        WireError: (control's) this process cannot listen there.
        RankEnvironmentError: The launcher has set no variable that the ranks have in common.
        ValueError: See `initialize_spmd`.
    """
    if launch.world_size == 1:
        return OpenedJob(None, "", [])
    note = _Note.of(launch, store_name, deadline)
    run = f"spmd-{os.urandom(12).hex()}" if note is not None else launch.token(store_name)
    if not trust.means_several_hosts(launch):
        served = control.serve_job(run)
        closes: list[Callable[[], object]] = [served.close]
        written, gate = {"path": str(served.path)}, None
    else:
        gate = trust.gate(trust.address or _address_of_rank_0(launch, note))
        from skipper.control.cluster.hosts import job_gate

        keeper = job_gate.JobGate(runtime.current(), gate, run)
        closes = [keeper.close]
        gate = dataclasses.replace(gate, port=addresses.port_of(keeper.address))
        written = {"gate": keeper.address}
    opened = OpenedJob(gate, run, closes)
    if note is not None:
        try:
            note.write({"run": run, **written})
        except BaseException:
            opened.close()
            raise
        closes.append(note.erase)
    return opened


def enter_job(
    launch: Launch, trust: Trust, store_name: str, deadline: float, *, is_member: bool, gave_up: threading.Event
) -> EnteredJob:
    """Join the job of rank 0; blocks until it is open.

    Raises:
        StoreTimeoutError: (a `TimeoutError`) it was not open in time.
        StoreRendezvousError: Rank 0 is on another host, and there is no secret.
        AlreadyInJobError: (control's) this process is part of another job.
        AuthenticationError: (control's) rank 0 has another secret.
        ValueError: See `initialize_spmd`.
    """
    note = _Note.of(launch, store_name, deadline)
    began_s = time.monotonic()
    if note is None:
        _check_reachable(launch, trust)
    while True:
        try:
            found = note.read() if note is not None else _derived(launch, trust, store_name)
            entered = _enter(launch, trust, found, max(min(_CONNECT_S, deadline - time.monotonic()), 0.1), is_member)
        except (JobNotFoundError, RemoteHostError, HostUnreachableError, DeadlineError) as error:
            if time.monotonic() > deadline:
                where = f"rank {launch.rank} could not reach rank 0 within {time.monotonic() - began_s:.0f} s"
                raise StoreTimeoutError(f"{where}: {error}") from error
        else:
            if gave_up.is_set() and entered.has_joined:
                control.shutdown()
            return entered
        if gave_up.wait(_LOOK_S):
            raise StoreTimeoutError(f"rank {launch.rank} no longer waits for rank 0")


def _enter(launch: Launch, trust: Trust, found: dict[str, str], timeout: float, is_member: bool) -> EnteredJob:
    name, run = f"rank {launch.rank}", found["run"]
    if "path" in found:
        return EnteredJob(None, run, control.join(found["path"], name=name, timeout=timeout))
    gate = trust.gate(addresses.SCHEME + found["gate"])
    if not is_member:
        from skipper.control.cluster.hosts import job_gate

        job_gate.enter_by_gate(gate, run, name, timeout=timeout)
    return EnteredJob(gate, run, has_joined=not is_member)


def _derived(launch: Launch, trust: Trust, store_name: str) -> dict[str, str]:
    """The place of rank 0, derived from what all ranks know."""
    run = launch.token(store_name)
    if not trust.means_several_hosts(launch):
        return {"run": run, "path": run}  # `join` takes the name of a job for its file
    host, port = addresses.parse(trust.address or _address_of_rank_0(launch, None))
    return {"run": run, "gate": addresses.at(host, port)}


def _address_of_rank_0(launch: Launch, note: _Note | None) -> str:
    """Where rank 0 listens: at one IP, never on all addresses.

    It uses any free port if rank 0 can publish it, otherwise MASTER_PORT, which is free for ``torch.distributed`` again
    when the ranks have met.

    Raises:
        StoreRendezvousError: The address of rank 0 is not known.
    """
    host, port = launch.master_addr, launch.master_port
    if note is not None:
        host, port = host if host is not None and _is_here(host) else _own_address(), 0
    if host is None or port is None:
        raise StoreRendezvousError(
            "ranks of several hosts need MASTER_ADDR and MASTER_PORT: set them, or pass address='tcp://HOST:PORT'"
        )
    if _is_at_loopback(host) and not (host == "localhost" or host.startswith("127.") or ":" in host):
        host = _own_address()  # a host often has its own name for its loopback (127.0.1.1 in Debian's /etc/hosts)
    return f"{addresses.SCHEME}{host}:{port}"


def _own_address() -> str:
    try:
        return addresses.own_address_towards(_ELSEWHERE)
    except OSError as error:
        raise StoreRendezvousError(
            f"this host has no route to other networks, so its address is unknown ({error.strerror}): set MASTER_ADDR "
            "to the IP of rank 0's host, or pass address='tcp://IP:PORT'"
        ) from error


def _check_reachable(launch: Launch, trust: Trust) -> None:
    """Detect at once an error that would otherwise appear only at the deadline.

    Raises:
        StoreRendezvousError: Rank 0 is on another host, and this rank does not know the secret.
    """
    if trust.means_several_hosts(launch) or launch.master_addr is None or _is_here(launch.master_addr):
        return
    raise StoreRendezvousError(
        f"rank {launch.rank} is not on the host of rank 0, {launch.master_addr}: ranks of several hosts need a common "
        f"secret. Pass certs= (or set {CERTS_VARIABLE}), or secret_file= (or set {SECRET_VARIABLE}) and "
        f"insecure=True (or set {INSECURE_VARIABLE}=1)"
    )


def _is_here(host: str) -> bool:
    """Whether a name or an IP is one of this host; True also if the name cannot be resolved."""
    try:
        ip, _ = addresses.parse(f"{host}:0")
    except ValueError:
        return True
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as probe:
        try:
            probe.bind((ip, 0))
        except OSError:
            return False
        return True


def _is_at_loopback(host: str | None) -> bool:
    """Whether only its own host can reach a name or an IP."""
    if host is None:
        return False
    try:
        return addresses.is_loopback(addresses.parse(f"{host}:0")[0])
    except ValueError:
        return False


class _Note:
    """Rank 0's note for the others in a store of ``torch.distributed``, which rank 0 erases when all have read it."""

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key

    @staticmethod
    def of(launch: Launch, store_name: str, deadline: float) -> _Note | None:
        """The note of these ranks; None: there is no such store.

        Raises:
            StoreTimeoutError: The store of torchrun's agent does not answer.
            StoreRendezvousError: That store fails in another way.
        """
        if launch.has_group:
            return _Note(dist.distributed_c10d._get_default_store(), f"{_PREFIX}/{store_name}")
        if os.environ.get(_AGENT_VARIABLE) != "True" or launch.master_addr is None or launch.master_port is None:
            return None
        timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        store = _translated(
            lambda: dist.TCPStore(  # type: ignore[attr-defined]
                str(launch.master_addr), int(launch.master_port or 0), is_master=False, timeout=timeout
            ),
            f"rank {launch.rank} does not reach the store of torchrun at {launch.master_addr}:{launch.master_port}",
        )
        return _Note(store, f"{_PREFIX}/{launch.job}/{store_name}")

    def write(self, content: dict[str, str]) -> None:
        """Write the note."""
        _translated(lambda: self._store.set(self._key, json.dumps(content)), "rank 0 could not publish its address")

    def read(self) -> dict[str, str]:
        """The content that rank 0 has written.

        Raises:
            JobNotFoundError: Nothing yet.
            StoreRendezvousError: The store is gone.
        """
        # No blocking wait: it would block the group's store for others.
        if not _translated(lambda: self._store.check([self._key]), "the store in which rank 0 publishes its address"):
            raise JobNotFoundError("it has not published its address")
        text = _translated(lambda: self._store.get(self._key), "the store in which rank 0 publishes its address")
        if not text:
            raise JobNotFoundError("it admits no more ranks")
        return parse_note(text)

    def erase(self) -> None:
        """Empty the note. If it were deleted, a rank that has just seen it would wait for it."""
        with suppress(dist.DistError):
            self._store.set(self._key, "")


def parse_note(content: bytes) -> dict[str, str]:
    """The fields of rank 0's note: ``run``, the name that the ranks have in common, and ``path`` or ``gate``.

    Raises:
        StoreRendezvousError: It is not a note of rank 0.
    """
    try:
        note = json.loads(content)
    except (ValueError, RecursionError):
        note = None
    is_note = isinstance(note, dict) and set(note) in ({"run", "path"}, {"run", "gate"})
    if not is_note or not all(isinstance(value, str) for value in note.values()):
        raise StoreRendezvousError("another process has written into the store in which rank 0 publishes its address")
    return dict(note)


def _translated(call: Callable[[], Any], doing: str) -> Any:
    """Call a store of torch, and translate its errors into those of this package.

    Raises:
        StoreTimeoutError: It took too long.
        StoreRendezvousError: It failed otherwise, for example because the process that hosts it has died.
    """
    try:
        return call()
    except dist.DistStoreError as error:
        raise StoreTimeoutError(f"{doing}: {_headline(error)}") from error
    except (dist.DistError, ValueError) as error:
        raise StoreRendezvousError(f"{doing}: {_headline(error)}") from error


def _headline(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
