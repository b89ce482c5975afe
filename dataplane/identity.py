"""Who owns memory: an identity that no later process can have, and a way to see that its process is gone."""

import errno
import os
import secrets
import time
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b

from skipper.dataplane._copy import gone
from skipper.dataplane.errors import BackendUnavailableError, OwnerDiedError

_EXIT_S = 0.05  # a socket or a queue pair fails shortly before its process counts as gone
_DYING_S = 2.0  # how long the rest of an exit that has begun may take on a busy machine

# Fields 9 and 22 of /proc/<pid>/stat, counted after the command name, which may itself hold blanks and parentheses:
# proc(5).
_FLAGS_FIELD, _START_TIME_FIELD = 9 - 3, 22 - 3
_LONGEST_LINE = 4096  # of the files read here, which one read returns complete
_PF_EXITING = 0x4  # linux/sched.h


@dataclass(frozen=True, slots=True)
class OwnerId:
    """The process that a buffer belongs to.

    Attributes:
        host: Same number for processes that share a kernel and a pid namespace, and so can see each other in /proc.
        pid: Process id within that namespace.
        started: When the process started, in clock ticks since boot.
        token: A random number, new in every process and after every fork.

    Example:
        ```python
        import os

        import numpy as np

        from skipper.dataplane import OwnerId, RDMABuffer

        owner: OwnerId = RDMABuffer(np.zeros(4)).owner
        print(owner.pid == os.getpid())  # True
        ```
    """

    host: int
    pid: int
    started: int
    token: int

    def __str__(self) -> str:
        return f"process {self.pid} of host {self.host:016x}"


def host_id() -> int:
    """This kernel and pid namespace as 64 bits.

    Not cached: a forked child may have been moved into another pid namespace.

    Raises:
        BackendUnavailableError: The system does not say, for example without a file descriptor left.
    """
    boot = _read("/proc/sys/kernel/random/boot_id").decode("ascii").strip()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return int.from_bytes(blake2b(f"{boot}/{namespace}".encode(), digest_size=8).digest(), "little")


def start_time(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot; None when there is no such process.

    Raises:
        BackendUnavailableError: The system does not say, for example without a file descriptor left.
    """
    fields = _stat(pid)
    return None if fields is None else int(fields[_START_TIME_FIELD])


def is_dying(pid: int) -> bool:
    """Whether the kernel is ending a process, or has ended it.

    Raises:
        BackendUnavailableError: The system does not say, for example without a file descriptor left.
    """
    fields = _stat(pid)
    return fields is None or bool(int(fields[_FLAGS_FIELD]) & _PF_EXITING)


def _stat(pid: int) -> list[bytes] | None:
    try:
        # The main thread's file: qemu itself answers /proc/PID/stat if a process reads its own.
        stat = _read(f"/proc/{pid}/task/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat[stat.rindex(b")") + 2 :].split()


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a file object would cost as much again
        try:
            return os.read(fd, _LONGEST_LINE)
        finally:
            os.close(fd)
    except (FileNotFoundError, ProcessLookupError):
        raise
    except OSError as error:
        raise BackendUnavailableError(
            f"cannot tell processes apart: {path}: {error.strerror}{limit_hint(error)}"
        ) from error


def new_owner() -> OwnerId:
    """The identity of this process, with a new token.

    Raises:
        BackendUnavailableError: See `host_id`.
    """
    pid = os.getpid()
    started = start_time(pid)
    return OwnerId(host_id(), pid, started or 0, secrets.randbits(64))


class ProcessWatch:
    """A pidfd of another process of this host: shows at once, and reliably, whether this one process is gone.

    Attributes:
        pidfd: For `_copy.guarded_copy`; -1 once closed.
    """

    __slots__ = ("__weakref__", "owner", "pidfd")

    def __init__(self, owner: OwnerId) -> None:
        """Open the pidfd, then compare start times: in this order a reused pid is always detected.

        Raises:
            OwnerDiedError: There is no such process, or another one has its pid now.
            BackendUnavailableError: It cannot be watched, for example without a file descriptor left.
        """
        self.owner = owner
        self.pidfd = -1
        try:
            self.pidfd = os.pidfd_open(owner.pid)
        except (ProcessLookupError, ValueError, OverflowError):
            raise OwnerDiedError(f"{owner} is gone") from None
        except OSError as error:
            raise BackendUnavailableError(f"cannot watch {owner}: {error.strerror}{limit_hint(error)}") from error
        if start_time(owner.pid) != owner.started or gone(self.pidfd):
            self.close()
            raise OwnerDiedError(f"{owner} is gone; its pid belongs to another process now or to none")

    @property
    def gone(self) -> bool:
        """Whether the process has exited (a zombie has)."""
        return self.pidfd < 0 or gone(self.pidfd)

    def gone_soon(self) -> bool:
        """Whether the process is gone; waits a moment for one that is ending."""
        begun = time.monotonic()
        while not self.gone:
            waited = time.monotonic() - begun
            if waited > _EXIT_S and (waited > _DYING_S or not is_dying(self.owner.pid)):
                return self.gone
            time.sleep(_EXIT_S / 50)
        return True

    def close(self) -> None:
        """Give the file descriptor back. Idempotent."""
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def __del__(self) -> None:
        self.close()


def limit_hint(error: OSError) -> str:
    """Text for the end of a message: the limit that was reached, if one was."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "; raise the limit of file descriptors (ulimit -n)"
    if error.errno == errno.ENOMEM:
        return "; there is not enough memory or address space (ulimit -v)"
    return ""


@cache
def page_size() -> int:
    """Bytes of a page of memory."""
    return os.sysconf("SC_PAGE_SIZE")
