"""`serve_job` and `join`: processes that this library has not started become part of a running job.

A rank of ``torchrun``, a worker of an inference engine or a notebook joins the job of a script of the same user, on
the same host. It learns the job's secret from a connection file (see `join_file`) and proves itself like every peer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from skipper.control.api.mesh import ProcMesh, this_proc
from skipper.control.model.errors import (
    AlreadyInJobError,
    AuthenticationError,
    DeadlineError,
    JobNotFoundError,
    JoinError,
    RemoteHostError,
    SupervisionError,
)
from skipper.control.model.future import Future
from skipper.control.runtime import current_runtime, join_file
from skipper.control.runtime.join_file import Connection
from skipper.control.runtime.process import Process
from skipper.control.runtime.requests import JOIN, PING
from skipper.control.wire.addresses import within_host
from skipper.control.wire.auth import NOT_OUR_SECRET
from skipper.trust import folder

SERVE_VARIABLE = "SKIPPER_SERVE"
"""Environment variable: under which name a script's job is to be served from its beginning on (see `serve_job`)."""
JOB_VARIABLE = "SKIPPER_JOB"
"""Environment variable that says which job to join: what `join` takes as an address, or a connection file's content."""


_log = logging.getLogger("skipper.control")


class ServedJob:
    """The job of this script, open to other processes of the same user on this host; a context manager.

    Attributes:
        name: its name among the user's jobs.
        path: its connection file, which holds the job's secret. Pass the path around, never the content.
    """

    def __init__(self, process: Process, connection: Connection, path: Path) -> None:
        self._process = process
        self._connection = connection
        self.name = connection.name
        self.path = path

    def members(self) -> tuple[ProcMesh, ...]:
        """The processes that have joined and are still there, in the order in which they came, each as a mesh of one.

        Actors can be spawned on them like on any other. If one dies, their owner learns of it.
        """
        return joined(self._process)

    def environment(self, *, inline: bool = False) -> dict[str, str]:
        """What a process needs in its environment to `join` without an address.

        Args:
            inline: put the content of the connection file there, secret included, for a process that cannot see the
                file; its environment is then as confidential as the file.
        """
        return {JOB_VARIABLE: self._connection.encode() if inline else str(self.path)}

    def close(self) -> None:
        """Take nobody in any more; those who have joined stay. It happens by itself when the job ends."""
        join_file.remove(self.path, self._connection)

    def __enter__(self) -> ServedJob:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ServedJob {self.name} at {self.path}>"


def serve_job(name: str | None = None) -> ServedJob:
    """Let other processes of this user, on this host, `join` the job of this script.

    Its address and secret are written to a file of mode 0600, in a folder of mode 0700 below ``$XDG_RUNTIME_DIR`` or,
    where there is none, below the folder for temporary files. Nothing new listens.

    Args:
        name: under which it can be joined: letters, digits, ``.``, ``_``, ``-``; None: one that nobody else has.

    Raises:
        JobExistsError: (a `ValueError`) another running job of this user has that name.
        AlreadyInJobError: this process is not the root of its job, but was spawned or has joined.
        UnsafeFileError: the folder belongs to somebody else, or others may enter it.
        ValueError: that is no name for a job.
    """
    process = current_runtime.current()
    if process.root.id != process.me.id:
        raise AlreadyInJobError(f"{process.me.name} belongs to the job of another process, which alone can serve it")
    connection = Connection(
        name=name if name is not None else f"job-{process.me.job}-{secrets.token_hex(4)}",
        root=dataclasses.replace(process.me, address=within_host(process.me.id)),
        secret=process.secret,
        settings=process.settings,
        host=join_file.this_network(),
        hostname=os.uname().nodename,
    )
    join_file.running()  # sweeps away what dead jobs have left
    served = ServedJob(process, connection, join_file.write(connection))
    process.ending.before.append(served.close)
    return served


def serve_if_asked_to(process: Process) -> None:
    """Serve the job under the name that the environment gives it, for people who do not want to change the script."""
    name = os.environ.get(SERVE_VARIABLE)
    if not name or process.root.id != process.me.id:
        return
    try:
        serve_job(name)
    except (JoinError, ValueError) as error:
        _log.warning("this job is not served as %s=%s says: %s", SERVE_VARIABLE, name, error)


def joined(process: Process) -> tuple[ProcMesh, ...]:
    """The processes that have joined the job of this script, each as a mesh of one."""
    return cast("tuple[ProcMesh, ...]", process.members.meshes())


def join(address: str | os.PathLike[str] | None = None, *, name: str | None = None, timeout: float = 30.0) -> bool:
    """Become part of the running job that a script of this user, on this host, serves.

    From then on this process may do what the script may: call actors, spawn processes and actors (which it owns, with
    ``unhandled_fault_hook`` for what nobody handles), use `get_or_spawn_controller` and all that is built on it. Its
    end, however it comes, is noticed at once by all who deal with it. If the job ends first, this process stays alive
    and its calls raise `SupervisionError`. `shutdown` leaves the job, and so does the end of the process.

    Args:
        address: path of a connection file, or the name of a job; None: what the environment variable ``SKIPPER_JOB``
            says, or else the user's only job.
        name: of this process, for people; None: its command and process id.
        timeout: in seconds.

    Returns:
        True; or False where this process is part of that very job already, in which case nothing has changed.

    Raises:
        JobNotFoundError: (a `LookupError`) there is no such job, or it has ended.
        AlreadyInJobError: this process is part of another job.
        AuthenticationError: the job does not accept the secret.
        RemoteHostError: the job runs on another host.
        UnsafeFileError: others could read or could have written the connection file.
        DeadlineError: (a `TimeoutError`) the job did not answer in time.
    """
    connection = find(address)
    if current_runtime.is_running() and current_runtime.current().root.id == connection.root.id:
        return False
    enter(
        connection,
        name or own_name(),
        lambda process: process.request(connection.root, JOIN, this_proc()),
        timeout=timeout,
    )
    return True


def enter(connection: Connection, name: str, ask: Callable[[Process], Future[None]], *, timeout: float) -> Process:
    """Start the runtime of this process as one of a running job, and wait until the job has answered.

    Args:
        connection: of the job.
        name: of this process.
        ask: asks the job's root for something; with its answer this process is in.
        timeout: in seconds.

    Raises:
        JoinError: as `join` says.
        AuthenticationError: the job does not accept the secret.
        DeadlineError: (a `TimeoutError`) the job did not answer in time.
    """
    connection.check_reachable()
    process = current_runtime.start_joined(connection.root, connection.secret, connection.settings, name)
    try:
        ask(process).get(max(timeout, 0))
    except BaseException as error:
        current_runtime.shutdown(grace_s=0)
        if isinstance(error, DeadlineError):
            raise DeadlineError(f"the job {connection.name!r} did not answer within {timeout:g} s") from None
        if isinstance(error, SupervisionError) and NOT_OUR_SECRET in error.message:
            raise AuthenticationError(f"the job {connection.name!r} has another secret") from None
        if isinstance(error, SupervisionError):
            raise JobNotFoundError(f"the job {connection.name!r} cannot be joined: {error}") from error
        raise
    return process


def find(address: str | os.PathLike[str] | None) -> Connection:
    """How to reach the job of an address as `join` takes it.

    Raises:
        JobNotFoundError: there is none.
        RemoteHostError: it names a host and a port.
        UnsafeFileError: others could read or could have written the connection file.
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
            raise JobNotFoundError(f"which job is to be joined? {found}; pass a name or a path, or set {JOB_VARIABLE}")
        address = jobs[0]
    text = os.fspath(address)
    if text.lstrip().startswith("{"):  # not repeated in the message: it has a secret in it
        raise JobNotFoundError("an address is a path or a name, not the content of a connection file")
    if os.sep in text or not isinstance(address, str):
        return join_file.read(Path(text))
    host, colon, port = text.rpartition(":")
    if colon and port.isdecimal():
        raise RemoteHostError(f"{text}: processes of other hosts ({host}) cannot join yet")
    try:
        path = join_file.path_of(text)
    except ValueError as error:
        raise JobNotFoundError(str(error)) from error
    return join_file.read(path)


def own_name() -> str:
    """This process' command and process id."""
    command = Path("/proc/self/comm").read_text(encoding="utf-8", errors="replace").strip()
    return f"{command} {os.getpid()}"


@contextlib.contextmanager
def visiting(address: str | os.PathLike[str] | None = None, *, timeout: float = 10.0) -> Iterator[Process]:
    """This process as one of a running job, for as long as the context lasts: a tool looks at the job.

    A process that belongs to the job already stays what it is. A visitor does not count: it is not among
    `ServedJob.members`, and nothing is spawned on it.

    Args:
        address: as `join` takes it; None: the job that this process belongs to, or else what `join` would take.
        timeout: in seconds.

    Raises:
        JoinError: as `join` says.
        AuthenticationError: the job does not accept the secret.
        DeadlineError: (a `TimeoutError`) the job did not answer in time.
    """
    if address is None and current_runtime.is_running():
        yield current_runtime.current()
        return
    connection = find(address)
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
