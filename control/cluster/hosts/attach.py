"""`attach_to_hosts`: machines that run an agent become part of the job of this script."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

from skipper.control.api.mesh import HostMesh
from skipper.control.cluster.hosts import protocol
from skipper.control.model.errors import AlreadyInJobError, CertificateError, HostError, InsecureHostError
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.data_plane_access import open_data_plane
from skipper.control.support import private_file
from skipper.control.wire import addresses
from skipper.control.wire.certificates import SECRET, Certificates
from skipper.control.wire.identity import Role

HostAddresses: TypeAlias = "Iterable[str] | str | os.PathLike[str] | Callable[[], Iterable[str]]"

LEAST_SECRET_NBYTES = 16


def attach_to_hosts(
    hosts: HostAddresses,
    *,
    secret_file: str | os.PathLike[str] | None = None,
    certs: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    address: str | None = None,
    data_plane: bool | None = None,
    timeout: float = 30.0,
) -> HostMesh:
    """Make hosts part of this job, on each of which ``skipper host serve`` runs; call it before anything is spawned.

    On each host a process of the job starts, which launches what is spawned there. From then on this script listens at
    an address for other hosts, and so do the processes that it spawns later on any host; other hosts cannot reach those
    that it has spawned before.

    Args:
        hosts: addresses, ``tcp://HOST:PORT``; or a file with one in each line (``#`` begins a comment); or a function
            that returns them.
        secret_file: the file with the agents' secret, or with the one from which each agent's is made (``skipper host
            secret --per-host``); None: the file ``secret`` in ``certs``.
        certs: a folder with a script's certificate for this machine (``skipper certs issue --role script`` makes one),
            for TLS.
        insecure: use no TLS to other machines. Anyone on the network path can then read and change what is sent, and so
            run code in the job: the whole network has to be trusted.
        address: the IP at which the hosts reach this script; None: the one that this machine uses to reach the first
            host.
        data_plane: whether the data plane, which encrypts nothing, may carry data between hosts; None: only if there
            is no TLS. Otherwise large arguments go by TLS, and an `RDMABuffer` cannot be reached from other hosts.
        timeout: in seconds, for all of them.

    Returns:
        A mesh with the axis ``hosts``, in the order of the addresses.

    Raises:
        HostUnreachableError: (a `ConnectionError`) an agent does not answer, or the process that it has started cannot
            be reached.
        HostMismatchError: an agent runs another version of Python or of this library.
        HostError: an agent refuses, for example while it is drained.
        InsecureHostError: (a `ValueError`) another machine is to be attached without TLS, and ``insecure`` is not set.
        AuthenticationError: an agent has another secret, or one side does not accept the certificate of the other: it
            is for another role or cluster, or was revoked.
        CertificateError: (a `ValueError`) ``certs`` is not valid for TLS, or not that of a script.
        UnsafeFileError: others can read the secret.
        AlreadyInJobError: this process is not the script of its job.
        ValueError: there are no hosts, one is listed twice, an address is not valid, or there is no secret.
    """
    from skipper.control.cluster.hosts import attachments  # only this process needs that module and its imports

    found = [addresses.parse(text) for text in listed(hosts)]
    if not found:
        raise ValueError("there are no hosts to attach")
    if len(set(found)) != len(found):
        raise ValueError("a host is listed twice")
    process = runtime.current()
    if process.root.id != process.me.id:
        raise AlreadyInJobError(
            f"{process.me.name} belongs to the job of another process: attach hosts in the script of that job"
        )
    if secret_file is None and certs is None:
        raise ValueError("pass secret_file= (skipper host secret makes one), or certs= with a file named secret")
    beyond = [host for host, _ in found if not addresses.is_loopback(host)]
    if beyond and certs is None and not insecure:
        raise InsecureHostError(
            f"{beyond[0]} is another machine: pass certs= for TLS, or insecure=True where the whole network is trusted"
        )
    folder = None if certs is None else os.path.abspath(certs)
    certificates = None if folder is None else Certificates(folder)
    if certificates is not None:
        certificates.require(Role.SCRIPT, "attach_to_hosts")
    secret = read_secret(Path(secret_file) if secret_file is not None else Path(folder or "") / SECRET)
    if (process.state.certs != folder) and addresses.host_of(process.me.address):
        raise CertificateError(
            "this job already uses other certificates, or none: attach all its hosts with the same certs="
        )
    opened = (certs is None) if data_plane is None else data_plane
    if not addresses.host_of(process.me.address):
        try:
            own = address or addresses.own_address_towards(found[0][0])
        except OSError as error:
            raise HostError(f"this machine has no route to {found[0][0]}: {error}") from error
        process.listen_beyond(own, folder, data_plane_is_open=opened)
        if opened:
            open_data_plane(own)
    options = [
        attachments.AttachOptions(host, port, protocol.secret_of_host(secret, host), certificates, opened)
        for host, port in found
    ]
    return HostMesh(attachments.of_this_job().attach_all(options, timeout))


def listed(hosts: HostAddresses) -> list[str]:
    """The addresses from the argument of `attach_to_hosts`.

    Raises:
        ValueError: the file cannot be read.
    """
    if callable(hosts):
        return list(hosts())
    if isinstance(hosts, str) and hosts.startswith(addresses.SCHEME):
        return [hosts]
    if isinstance(hosts, str | os.PathLike):
        try:
            lines = Path(hosts).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ValueError(f"{os.fspath(hosts)} is neither tcp://HOST:PORT nor a file: {error.strerror}") from error
        return [text for line in lines if (text := line.partition("#")[0].strip())]
    return list(hosts)


def read_secret(path: Path) -> bytes:
    """The secret of agents; spaces and line breaks around it do not count.

    Raises:
        UnsafeFileError: others could read the file, or could have written it.
        ValueError: it cannot be read, or is too short.
    """
    return private_file.read_secret(path, least_nbytes=LEAST_SECRET_NBYTES).strip()
