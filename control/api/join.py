"""`serve_job`, `join` and `leave`: processes that this library has not started become part of a running job.

A rank of ``torchrun``, a worker of an inference engine or a notebook joins the job of a script. On the script's host it
reads the job's secret from a connection file (see `join_file`); on another host it asks at the address that the script
serves, and both sides prove that they know a common secret. After that it authenticates like every peer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol, cast

from skipper.control.api import announced
from skipper.control.api.announced import connection_of
from skipper.control.api.mesh import ProcMesh, this_proc
from skipper.control.model.errors import (
    AlreadyInJobError,
    AuthenticationError,
    DeadlineError,
    JobExistsError,
    JobNotFoundError,
    JoinError,
    SupervisionError,
)
from skipper.control.model.future import Future
from skipper.control.runtime import current_runtime, join_file
from skipper.control.runtime.data_plane_access import open_data_plane
from skipper.control.runtime.join_file import Connection
from skipper.control.runtime.process import Process
from skipper.control.runtime.requests import JOIN, PING
from skipper.control.support.ancestors import ancestors
from skipper.control.wire.addresses import SCHEME
from skipper.control.wire.auth import NOT_ADMITTED, NOT_OUR_SECRET
from skipper.trust import SECRET_VARIABLE, folder

SERVE_VARIABLE = "SKIPPER_SERVE"
"""Environment variable with the name under which a script's job is served from the start (see `serve_job`)."""
JOB_VARIABLE = "SKIPPER_JOB"
"""Environment variable with the job to join: an address as for `join`, or the content of a connection file."""
CERTS_VARIABLE = "SKIPPER_CERTS"
"""Environment variable with the folder of this host's certificates, for jobs with processes on several hosts."""
INSECURE_VARIABLE = "SKIPPER_INSECURE"
"""Environment variable: 1 means that the whole network is trusted, like ``insecure=True``."""

_LOOK_S = 1.0
"""How often a process that waits for the answer of a job checks whether the job has ended."""

_ANSWER_S = 5.0
"""How long the script of a job has to answer before this process may leave the job for another one."""

_NOT_SERVED = "%s=%s asks to serve this job, which is not possible: %s"

PathLike = str | os.PathLike[str]

_log = logging.getLogger("skipper.control")


class _Gate(Protocol):
    """Admits processes of other hosts."""

    address: str

    def close(self) -> None: ...


class _Remote(Protocol):
    """Functions for other hosts, which are in a layer above: see `RemoteJobs`."""

    def open(
        self,
        process: Process,
        address: str,
        secret_file: PathLike | None,
        certs: PathLike | None,
        *,
        insecure: bool,
        data_plane: bool | None,
    ) -> _Gate: ...

    def find(
        self, address: str, secret_file: PathLike | None, certs: PathLike | None, *, insecure: bool, timeout: float
    ) -> Connection: ...


_find_remote: Callable[[], _Remote]


def reach_beyond_by(find: Callable[[], _Remote]) -> None:
    """Register a function. The object that it makes opens jobs to other hosts, and finds jobs there."""
    global _find_remote
    _find_remote = find


class ServedJob:
    """The job of this script, which other processes of the same user can join; a context manager.

    Attributes:
        name: its name among the user's jobs of this host.
        path: its connection file, which holds the job's secret. Pass the path around, never the content.
        address: where processes of other hosts join it, ``tcp://IP:PORT``; None: they cannot.

    Example:
        ```python
        import subprocess
        import sys

        from skipper.control import serve_job

        visitor = "import sys; from skipper import control; control.join(sys.argv[1], name='visitor'); print('joined')"
        with serve_job() as served:
            said = subprocess.check_output([sys.executable, "-c", visitor, served.path], text=True)
        print(said.strip())  # joined
        ```
    """

    def __init__(self, process: Process, connection: Connection, path: Path, gate: _Gate | None = None) -> None:
        self._process = process
        self._connection = connection
        self._gate = gate
        self.name = connection.name
        self.path = path
        self.address = None if gate is None else f"{SCHEME}{gate.address}"

    def members(self) -> tuple[ProcMesh, ...]:
        """The processes that have joined and are still there, in the order of joining, each as a mesh of one.

        Actors can be spawned on them like on any other. If one dies, their owner learns of it.
        """
        return joined(self._process)

    def environment(self, *, inline: bool = False) -> dict[str, str]:
        """The environment variables with which a process of this host can `join` without an address.

        Args:
            inline: put the content of the connection file there, secret included, for a process that cannot see the
                file; its environment is then as confidential as the file.
        """
        return {JOB_VARIABLE: self._connection.encode() if inline else str(self.path)}

    def close(self) -> None:
        """Stop accepting processes; those that have joined stay. This happens by itself when the job ends."""
        join_file.remove(self.path, self._connection)
        if self._gate is not None:
            self._gate.close()

    def __enter__(self) -> ServedJob:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ServedJob {self.name} at {self.address or self.path}>"


def serve_job(
    name: str | None = None,
    *,
    address: str | None = None,
    secret_file: PathLike | None = None,
    certs: PathLike | None = None,
    insecure: bool = False,
    data_plane: bool | None = None,
) -> ServedJob:
    """Let other processes of this user `join` the job of this script: on this host, and on others by an address.

    Its address and secret are written to a file of mode 0600, in a folder of mode 0700 below ``$XDG_RUNTIME_DIR`` or,
    if that is not set, below the folder for temporary files. Without ``address`` nothing new listens.

    With ``address`` this process listens there and, at a port that the system chooses, for the links of the job; so do
    the processes that it spawns and those that join from then on. Call it before anything is spawned or joins, and
    before the data plane is used: other hosts cannot reach the processes that were there before.

    Args:
        name: the name by which it can be joined on this host: letters, digits, ``.``, ``_``, ``-``; None: a unique one.
        address: where other hosts join it, ``tcp://HOST:PORT``: an IP of this host, a name, or a network device; port
            0: a free one, see `ServedJob.address`. None: other hosts cannot join it.
        secret_file: the file with the secret that all hosts have (``skipper host secret`` makes one); None: the file
            ``secret`` in ``certs``, or without certificates what SKIPPER_SECRET_FILE names.
        certs: a folder with a script's certificate for this host (``skipper certs issue --role script`` makes one),
            for TLS; None: what SKIPPER_CERTS names, unless ``secret_file`` is given.
        insecure: use no TLS between hosts. Anyone on the network path can then run code in the job. SKIPPER_INSECURE=1
            means the same.
        data_plane: whether the data plane, which encrypts nothing, may carry data between hosts; None: only if there
            is no TLS. Without the data plane only small values reach other hosts.

    Raises:
        JobExistsError: (a `ValueError`) another running job of this user has that name.
        AlreadyInJobError: this process is not the root of its job: it was spawned or has joined.
        UnsafeFileError: the folder belongs to another user, or others may enter it; or others can read the secret.
        InsecureHostError: (a `ValueError`) there are no certificates, and ``insecure`` is not set.
        CertificateError: (a `ValueError`) ``certs`` is not valid for TLS, or the job already uses other certificates.
        WireError: this process cannot listen on the address.
        ValueError: the name or the address is not valid, or there is no secret.
    """
    process = current_runtime.current()
    if process.root.id != process.me.id:
        raise AlreadyInJobError(
            f"{process.me.name} belongs to the job of another process: call serve_job in the script of that job"
        )
    if name is not None:
        join_file.path_of(name)
    if address is None and not (secret_file is None and certs is None and data_plane is None and not insecure):
        raise ValueError(
            "these options are for other hosts, which need an address: pass address='tcp://HOST:PORT', too"
        )
    gate = None
    if address is not None:
        trusted = _trust(secret_file, certs, insecure=insecure)
        gate = _find_remote().open(
            process, address, trusted.secret_file, trusted.certs, insecure=trusted.insecure, data_plane=data_plane
        )
    connection = connection_of(process, name if name is not None else f"job-{process.me.job}-{secrets.token_hex(4)}")
    try:
        join_file.running()  # removes the files of dead jobs
        served = ServedJob(process, connection, join_file.write(connection), gate)
    except BaseException:
        if gate is not None:
            gate.close()
        raise
    process.ending.before.append(served.close)
    return served


@dataclasses.dataclass(frozen=True, slots=True)
class _Trust:
    """How processes of several hosts authenticate each other."""

    secret_file: PathLike | None
    certs: PathLike | None
    insecure: bool


def _trust(secret_file: PathLike | None, certs: PathLike | None, *, insecure: bool) -> _Trust:
    """The same; the environment gives the arguments that were not passed.

    Raises:
        ValueError: the environment says neither yes nor no.
    """
    if secret_file is None and certs is None:
        certs = os.environ.get(CERTS_VARIABLE) or None
        secret_file = None if certs else os.environ.get(SECRET_VARIABLE) or None
    return _Trust(secret_file, certs, insecure or insecure_by_environment())


def insecure_by_environment() -> bool:
    """Whether the environment says that the whole network is trusted.

    Raises:
        ValueError: it says neither yes nor no.
    """
    said = os.environ.get(INSECURE_VARIABLE, "")
    if said not in ("", "0", "1"):
        raise ValueError(f"{INSECURE_VARIABLE} must be 1 (the whole network is trusted), 0 or not set, not {said!r}")
    return said == "1"


def serve_if_asked_to(process: Process) -> None:
    """Serve the job under the name in the environment, so that the script need not be changed."""
    name = os.environ.get(SERVE_VARIABLE)
    if not name or process.root.id != process.me.id:
        return
    try:
        serve_job(name)
    except JobExistsError as error:
        # The variable is meant for the script with that name; processes that the script starts only inherit it.
        level = logging.DEBUG if _is_of_an_ancestor(name) else logging.WARNING
        _log.log(level, _NOT_SERVED, SERVE_VARIABLE, name, error)
    except (JoinError, ValueError) as error:
        _log.warning(_NOT_SERVED, SERVE_VARIABLE, name, error)


def _is_of_an_ancestor(name: str) -> bool:
    """Whether a process from which this one descends serves the job of this name."""
    try:
        server = join_file.pid_of(join_file.read(join_file.path_of(name)))
    except JoinError:  # it has just ended
        return False
    return server in ancestors()


def joined(process: Process) -> tuple[ProcMesh, ...]:
    """The processes that have joined the job of this script, each as a mesh of one."""
    return cast("tuple[ProcMesh, ...]", process.members.meshes())


def join(
    address: PathLike | None = None,
    *,
    name: str | None = None,
    timeout: float = 30.0,
    replace: bool = False,
    secret_file: PathLike | None = None,
    certs: PathLike | None = None,
    insecure: bool = False,
) -> bool:
    """Join the running job that a script serves: a job of this user on this host, or one on another host, by address.

    From then on this process can do what the script can: call actors, spawn processes and actors (which it owns, with
    ``unhandled_fault_hook`` for failures that nothing handles), use `get_or_spawn_controller` and all that is built on
    it. Its end is noticed at once by all processes that are connected to it. If the job ends first, this process stays
    alive and its calls raise `SupervisionError`; it leaves that job by itself when it joins another one. If the job has
    lost this process, because it was stopped or the network was interrupted, it joins again. `leave` leaves the job,
    and so does the end of the process.

    Args:
        address: path of a connection file, or the name of a job of this host; or ``tcp://HOST:PORT``, where a script on
            another host serves its job; None: the value of the environment variable ``SKIPPER_JOB``, or else the user's
            only job on this host.
        name: name of this process, for people; None: its command and process id.
        timeout: in seconds.
        replace: leave the job that this process has joined before, although it still runs.
        secret_file: with ``tcp://``: the file with the secret that all hosts have; None: as for `serve_job`.
        certs: with ``tcp://``: a folder with this host's certificate, of the role host or script; None: as for
            `serve_job`.
        insecure: with ``tcp://``: use no TLS, because the whole network is trusted. SKIPPER_INSECURE=1 means the same.

    Returns:
        True; or False if this process is already part of that job, and nothing has changed.

    Raises:
        JobNotFoundError: (a `LookupError`) there is no such job, or it has ended.
        AlreadyInJobError: this process is part of another job that still runs, or was spawned in one, or is the script
            of a job of its own.
        AuthenticationError: the job does not accept the secret or the certificate of this process, or this process does
            not accept those of the job.
        HostMismatchError: the script on the other host runs another version of Python or of this library.
        RemoteHostError: the connection file is that of a job on another host.
        UnsafeFileError: others could read or could have written the connection file, or could read the secret.
        InsecureHostError: (a `ValueError`) another host is to be joined without TLS, and ``insecure`` is not set.
        CertificateError: (a `ValueError`) ``certs`` is not valid for TLS.
        DeadlineError: (a `TimeoutError`) the job did not answer in time.
        ValueError: there is no secret for another host.
    """
    deadline = time.monotonic() + max(timeout, 0)
    trusted = _trust(secret_file, certs, insecure=insecure)
    connection = find(address, trusted, timeout=timeout)
    if current_runtime.is_running():
        if current_runtime.current().root.id != connection.root.id:
            connection.check_reachable()
            _make_way(connection, replace=replace, timeout=deadline - time.monotonic())
        elif _is_outside(current_runtime.current()):
            current_runtime.shutdown()
        else:
            return False
        gc.collect()  # see `leave`
    enter(
        connection,
        name or own_name(),
        lambda process: process.request(connection.root, JOIN, this_proc()),
        timeout=deadline - time.monotonic(),
    )
    return True


def leave(*, grace_s: float | None = None) -> bool:
    """Leave the job that this process has joined; the process may then join another one, or start its own.

    What it has spawned there ends. It releases stores, memory that it has published, and what it knew of the job's
    processes. To the others it is a process that has ended cleanly. This works as well if the job has ended before.

    Args:
        grace_s: seconds that its actors get to handle what they have received, see `shutdown`; None means
            `Settings.exit_grace_s`.

    Returns:
        Whether it was in a job.

    Raises:
        JoinError: this process has not joined its job: it is the script, or was spawned.
    """
    if not current_runtime.is_running():
        return False
    if not _has_joined(current_runtime.current()):
        name = current_runtime.current().me.name
        raise JoinError(f"{name!r} did not join its job, so it cannot leave it: the job of a script ends by shutdown()")
    current_runtime.shutdown(grace_s=grace_s)
    # The objects of the runtime form reference cycles: collecting them now also closes their descriptors now.
    gc.collect()
    return True


def _has_joined(process: Process) -> bool:
    return process.root_actor is not None and process.root.id != process.me.id


def _is_outside(process: Process) -> bool:
    """Whether the script considers a process that has joined as lost, because it was stopped or cut off."""
    link = process.transport.find(process.root.id)
    return _has_joined(process) and (link is None or link.lost is not None)


def _make_way(connection: Connection, *, replace: bool, timeout: float) -> None:
    """Leave the job of this process for another one, if it may be left.

    Raises:
        AlreadyInJobError: it may not.
    """
    process = current_runtime.current()
    if not _has_joined(process):
        raise AlreadyInJobError(f"this process already belongs to a job, as {process.me.name!r}")
    if not replace:
        try:
            process.request(process.root, PING).get(max(min(_ANSWER_S, timeout), 0))
        except SupervisionError:
            pass  # that job has ended
        except DeadlineError:
            raise AlreadyInJobError(
                f"this process is part of a job, as {process.me.name!r}, whose script does not answer, but may be "
                "alive: call leave() first, or join(..., replace=True)"
            ) from None
        else:
            raise AlreadyInJobError(
                f"this process is part of a job that runs, as {process.me.name!r}: call leave() first, or "
                f"join(..., replace=True), to join the job {connection.name!r}"
            )
    current_runtime.shutdown()


def enter(connection: Connection, name: str, ask: Callable[[Process], Future[None]], *, timeout: float) -> Process:
    """Start the runtime of this process as one of a running job, and wait until the job has answered.

    Args:
        connection: the connection to the job.
        name: name of this process.
        ask: sends a request to the job's root; the answer completes the join.
        timeout: in seconds.

    Raises:
        JoinError: as `join` says.
        AuthenticationError: the job does not accept the secret, or the certificate.
        DeadlineError: (a `TimeoutError`) the job did not answer in time.
    """
    connection.check_reachable()
    beyond = connection.beyond
    if beyond is None:
        process = current_runtime.start_joined(connection.root, connection.secret, connection.settings, name)
    else:
        if beyond.data_plane:
            open_data_plane(beyond.host)
        process = current_runtime.start_joined(
            connection.root,
            connection.secret,
            connection.settings,
            name,
            host=beyond.host,
            certs=beyond.certs,
            data_plane_is_open=beyond.data_plane,
        )
    try:
        _wait(ask(process), connection, timeout)
    except BaseException as error:
        current_runtime.shutdown(grace_s=0)
        if isinstance(error, DeadlineError):
            raise DeadlineError(f"the job {connection.name!r} did not answer in time") from None
        if isinstance(error, SupervisionError) and NOT_OUR_SECRET in error.message:
            raise AuthenticationError(f"the job {connection.name!r} has another secret") from None
        if isinstance(error, SupervisionError) and NOT_ADMITTED in error.message:
            raise AuthenticationError(f"the job {connection.name!r} and this process disagree: {error}") from None
        if isinstance(error, SupervisionError):
            raise JobNotFoundError(f"the job {connection.name!r} cannot be joined: {error}") from error
        raise
    return process


def _wait(answer: Future[None], connection: Connection, timeout: float) -> None:
    """Wait for the answer of a job, which may end before there is a connection whose loss would show it."""
    deadline = time.monotonic() + max(timeout, 0)
    while True:
        try:
            answer.get(max(min(deadline - time.monotonic(), _LOOK_S), 0))
            return
        except DeadlineError:
            if time.monotonic() >= deadline:
                raise
        connection.check_reachable()


def find(address: PathLike | None, trusted: _Trust | None = None, *, timeout: float = 30.0) -> Connection:
    """The connection to the job at an address, as for `join`.

    Args:
        address: as `join` takes it.
        trusted: how to authenticate a job of another host; None: as the environment says.
        timeout: in seconds, for a job on another host.

    Raises:
        JobNotFoundError: there is none.
        UnsafeFileError: others could read or could have written the connection file.
        AuthenticationError, InsecureHostError, CertificateError, ValueError: as `join` says, for a job on another host.
    """
    if address is None:
        address = os.environ.get(JOB_VARIABLE)
        # Only the environment may hold the content itself: an address may have come from anywhere.
        if address is not None and address.lstrip().startswith("{"):
            return join_file.decode(address, JOB_VARIABLE)
    if address is None:
        jobs = join_file.running()
        if len(jobs) != 1:
            found = f"there are {', '.join(jobs)}" if jobs else f"there is none in {folder()}"
            raise JobNotFoundError(
                f"which job do you want to join? {found}; pass a name or a path, or set {JOB_VARIABLE}"
            )
        address = jobs[0]
    text = os.fspath(address)
    if text.lstrip().startswith("{"):  # not repeated in the message: it has a secret in it
        raise JobNotFoundError("join takes a path, a name or an address, not the content of a connection file")
    if isinstance(address, str) and _is_remote(address):
        trusted = trusted or _trust(None, None, insecure=False)
        return _find_remote().find(
            address, trusted.secret_file, trusted.certs, insecure=trusted.insecure, timeout=timeout
        )
    if os.sep in text or not isinstance(address, str):
        return join_file.read(Path(text))
    try:
        path = join_file.path_of(text)
    except ValueError as error:
        raise JobNotFoundError(str(error)) from error
    return join_file.read(path)


def find_for_tools(address: PathLike | None, *, timeout: float = 30.0) -> Connection:
    """The connection to the job that a tool is to show: as for `find`, or a job that is only announced.

    Args:
        address: as for `join`, or the name of a script, with or without its process id, or the id of a job; None: the
            value of SKIPPER_JOB, or the user's only served job, or else the only one.
        timeout: in seconds, for a job on another host.

    Raises:
        JobNotFoundError: there is none, or there are several.
        UnsafeFileError, AuthenticationError, InsecureHostError, CertificateError, ValueError: as `find` says.
    """
    given = address if address is not None else os.environ.get(JOB_VARIABLE)
    if given is None:
        return _only_job()
    if isinstance(given, str) and os.sep not in given and not given.lstrip().startswith("{") and not _is_remote(given):
        try:
            return find(address, timeout=timeout)
        except JobNotFoundError:
            if (connection := announced.find(given)) is None:
                raise
            return connection
    return find(address, timeout=timeout)


def _ids(paths: Iterable[Path]) -> set[str]:
    ids = set()
    for path in paths:
        with contextlib.suppress(JoinError):  # it has just ended
            ids.add(join_file.read(path).root.id)
    return ids


def _only_job() -> Connection:
    served = {name: join_file.path_of(name) for name in join_file.running()}
    if len(served) == 1:
        return join_file.read(*served.values())
    others = announced.found(_ids(served.values()))
    if not served and len(others) == 1:
        return next(iter(others.values()))
    jobs = ", ".join([*served, *others])
    there_are = f"these run: {jobs}" if jobs else f"{folder()} lists no running job"
    raise JobNotFoundError(f"which job is meant? {there_are}; pass its name, or set {JOB_VARIABLE}")


def _is_remote(address: str) -> bool:
    """Whether an address names a host and a port."""
    host, colon, port = address.rpartition(":")
    return address.startswith(SCHEME) or bool(host and colon and port.isdecimal() and os.sep not in address)


def own_name() -> str:
    """This process' command and process id."""
    command = Path("/proc/self/comm").read_text(encoding="utf-8", errors="replace").strip()
    return f"{command} {os.getpid()}"


@contextlib.contextmanager
def visiting(address: str | os.PathLike[str] | None = None, *, timeout: float = 10.0) -> Iterator[Process]:
    """Make this process part of a running job while the context lasts, so that a tool can look at the job.

    A process that already belongs to the job keeps its role. A visitor does not count as a member: it is not among
    `ServedJob.members`, and nothing is spawned on it.

    Args:
        address: as for `find_for_tools`; None: the job that this process belongs to, or else as there.
        timeout: in seconds.

    Raises:
        JoinError: as `join` says.
        AuthenticationError: the job does not accept the secret.
        DeadlineError: (a `TimeoutError`) the job did not answer in time.
        InsecureHostError, CertificateError, ValueError: as `join` says, for a job on another host.
    """
    if address is None and current_runtime.is_running():
        yield current_runtime.current()
        return
    connection = find_for_tools(address, timeout=timeout)
    if current_runtime.is_running() and current_runtime.current().root.id == connection.root.id:
        yield current_runtime.current()
        return
    process = enter(
        connection, f"visitor {own_name()}", lambda process: process.request(connection.root, PING), timeout=timeout
    )
    try:
        yield process
    finally:
        current_runtime.shutdown(grace_s=0)
