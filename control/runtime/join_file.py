"""Connection files: where a process of the same user learns how to reach a job, and its secret.

They are in one folder of the user: ``$XDG_RUNTIME_DIR/skipper``, or else ``skipper-UID`` in the folder for temporary
files. The folder has mode 0700 and each file 0600; otherwise neither is used. A file outlives its job if the job is
killed; the next process that reads it finds that out by connecting to the job's socket, and removes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import socket
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from skipper.control.model.errors import JobExistsError, JobNotFoundError, RemoteHostError, UnsafeFileError
from skipper.control.model.settings import Settings
from skipper.control.support.private_file import check_private
from skipper.control.wire.addresses import within_host
from skipper.control.wire.process_ref import ProcessRef
from skipper.trust import folder

SERVED = ".json"
"""Suffix of the connection file of a job that its script serves: a process that asks for the user's only job may join
it."""
ANNOUNCED = ".job"
"""Suffix for any other job: tools of the same user find it, and processes that join do not."""

_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_UNIX = "unix-abstract:"
_MAX_NBYTES = 64 << 10
_KNOCK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Beyond:
    """How a process of a job works with processes on other hosts.

    Attributes:
        host: the IP at which they reach it.
        certs: the folder of the certificates for TLS with them; None: none.
        data_plane: whether the data plane may be used with them.
    """

    host: str
    certs: str | None
    data_plane: bool


@dataclass(frozen=True, slots=True)
class Connection:
    """What a process needs to know to join a job.

    Attributes:
        name: of the job, for people and for `join`.
        root: the process that serves it.
        secret: the job's secret.
        settings: the job's bounds, which hold for all of its processes.
        host: where it runs (see `this_network`); empty if it runs elsewhere and was asked just now.
        hostname: the same for people.
        beyond: how a process that joins works with other hosts; None: with none.
    """

    name: str
    root: ProcessRef
    secret: bytes
    settings: Settings
    host: str
    hostname: str
    beyond: Beyond | None = None

    def encode(self) -> str:
        """The content of the file: JSON."""
        return json.dumps(
            {
                "version": _VERSION,
                "name": self.name,
                "root": {"id": self.root.id, "address": self.root.address, "name": self.root.name},
                "secret": self.secret.hex(),
                "settings": dataclasses.asdict(self.settings),
                "host": self.host,
                "hostname": self.hostname,
                "beyond": self.beyond and dataclasses.asdict(self.beyond),
            }
        )

    def check_reachable(self) -> None:
        """Find out whether the job still runs, within the time of a connection to a local socket.

        Raises:
            RemoteHostError: it was started on another host, or in another network namespace.
            JobNotFoundError: it has ended.
        """
        if not self.host:
            return
        if self.host != this_network():
            raise RemoteHostError(
                f"the job {self.name!r} runs on {self.hostname!r}, and this process on {socket.gethostname()!r} or in "
                "another network namespace of it: join it at the address, tcp://HOST:PORT, that its script gave to "
                "serve_job(address=...)"
            )
        if not _answers(within_host(self.root.id)):
            raise JobNotFoundError(f"the job {self.name!r} has ended")

    def __repr__(self) -> str:
        return f"Connection(name={self.name!r}, root={self.root!r})"  # never the secret


def decode(text: str, origin: str) -> Connection:
    """Read the content of a connection file.

    Args:
        text: the content.
        origin: where it is from, for the error.

    Raises:
        JobNotFoundError: it is no connection file, or of another version of this library.
    """
    try:
        content = json.loads(text)
        if content["version"] != _VERSION:
            raise ValueError(f"it is of version {content['version']}, this library reads {_VERSION}")
        root, beyond = content["root"], content.get("beyond")
        return Connection(
            name=str(content["name"]),
            root=ProcessRef(str(root["id"]), str(root["address"]), str(root["name"])),
            secret=bytes.fromhex(content["secret"]),
            settings=Settings(**content["settings"]),
            host=str(content["host"]),
            hostname=str(content["hostname"]),
            beyond=None if beyond is None else _beyond(beyond),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        # Not chained: the traceback of a failed parse may show what was parsed.
        raise JobNotFoundError(f"{origin} is not the connection file of a job: {type(error).__name__}") from None


def _beyond(content: dict[str, object]) -> Beyond:
    import ipaddress  # most processes do not need it

    certs = content["certs"]
    return Beyond(
        str(ipaddress.ip_address(str(content["host"]))),
        None if certs is None else str(certs),
        data_plane=bool(content["data_plane"]),
    )


def this_network() -> str:
    """The host and the network namespace of the sockets that this thread opens."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.stat('/proc/thread-self/ns/net').st_ino}"


def path_of(name: str, suffix: str = SERVED) -> Path:
    """The connection file of a job of this name; ``suffix``: `SERVED` or `ANNOUNCED`.

    Raises:
        ValueError: it is not a valid name for a job.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"a job's name is made of letters, digits, '.', '_' and '-', 64 at most: {name!r} is not")
    return folder() / f"{name}{suffix}"


def write(connection: Connection, suffix: str = SERVED) -> Path:
    """Write the connection file of a job; the file is new, or was that of a dead job.

    Raises:
        ValueError: the job's name is not valid.
        JobExistsError: a running job has this name.
        UnsafeFileError: the folder belongs to somebody else, or others may enter it.
    """
    path = path_of(connection.name, suffix)
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(mode=0o700)
    with open_folder(path.parent) as where:
        draft = f".{secrets.token_hex(8)}"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=where)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(connection.encode())
            while True:
                try:
                    os.link(draft, path.name, src_dir_fd=where, dst_dir_fd=where)  # whole, or not at all
                except FileExistsError:
                    remove_if_stale(path)
                    if path.exists():
                        raise JobExistsError(f"another running job is already called {connection.name!r}") from None
                else:
                    return path
        finally:
            os.unlink(draft, dir_fd=where)


def read(path: Path) -> Connection:
    """Read a connection file, after a check that nobody else could have read or written it.

    Raises:
        JobNotFoundError: there is none, or it is no connection file.
        UnsafeFileError: it, or its folder, belongs to somebody else or is open to others.
    """
    with open_folder(path.parent, path) as where:
        try:
            fd = os.open(path.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=where)
        except OSError as error:
            raise JobNotFoundError(f"there is no job to join at {path}: {error.strerror}") from error
        with os.fdopen(fd, "rb") as file:
            check_private(os.fstat(fd), path, stat.S_ISREG)
            return decode(file.read(_MAX_NBYTES).decode("utf-8", "replace"), str(path))


def remove(path: Path, connection: Connection) -> None:
    """Remove the file if it still belongs to this job."""
    with contextlib.suppress(JobNotFoundError, UnsafeFileError, FileNotFoundError):
        if read(path).root == connection.root:
            path.unlink()


def remove_if_stale(path: Path) -> None:
    """Remove the file of a job that has ended; one that cannot be read is left alone."""
    with contextlib.suppress(UnsafeFileError, RemoteHostError, FileNotFoundError):
        try:
            connection = read(path)
            connection.check_reachable()
        except JobNotFoundError:
            path.unlink()


def running(suffix: str = SERVED) -> list[str]:
    """Names of this user's jobs that are served, or announced; the files of dead jobs are removed on the way.

    Raises:
        UnsafeFileError: the folder belongs to somebody else, or others may enter it.
    """
    try:
        with open_folder(folder()) as where:
            found = sorted(name for name in os.listdir(where) if name.endswith(suffix))
    except JobNotFoundError:
        return []
    names = []
    for name in found:
        path = folder() / name
        remove_if_stale(path)
        if path.exists():
            names.append(path.name.removesuffix(suffix))
    return names


def pid_of(connection: Connection) -> int:
    """The id of the process that serves a job, as seen by this process; 0 if it is not on this host."""
    if connection.host != this_network():
        return 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        knock.settimeout(_KNOCK_TIMEOUT_S)
        try:
            knock.connect("\0" + within_host(connection.root.id).removeprefix(_UNIX))
        except OSError:
            return 0
        pid, _, _ = struct.unpack("iii", knock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid)


@contextlib.contextmanager
def open_folder(path: Path, file: Path | None = None) -> Iterator[int]:
    """A descriptor of a folder that only this user may enter; ``file``: the file to find there, for messages."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise UnsafeFileError(f"{path} is a link, which could lead to another folder") from None
        where = f"in {path}" if file is None else f"at {file}"
        raise JobNotFoundError(f"there is no job to join {where}: {error.strerror}") from error
    try:
        if (owner := os.fstat(fd).st_uid) != os.geteuid():
            raise UnsafeFileError(
                f"{path} belongs to the user {owner}, not to {os.geteuid()}: set XDG_RUNTIME_DIR to a folder of yours"
            )
        check_private(os.fstat(fd), path, stat.S_ISDIR)
        yield fd
    finally:
        os.close(fd)


def _answers(address: str) -> bool:
    """Whether a process listens there: an abstract socket ends with its process, and its name is never used again."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        knock.settimeout(_KNOCK_TIMEOUT_S)
        try:
            knock.connect("\0" + address.removeprefix(_UNIX))
        except ConnectionRefusedError:
            return False
        except (TimeoutError, BlockingIOError):
            return True  # its queue is full: the process is frozen or busy, but exists
    return True
