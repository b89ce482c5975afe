"""The guard: a small process between one that launches processes and those. No descendant of theirs outlives them.

A process that an actor has made, and those which that one has made, stay alive when their parent ends: the kernel gives
them another parent, the nearest ancestor that has asked for it (``PR_SET_CHILD_SUBREAPER`` of prctl(2)). Here that is a
*keeper*, a fork of the guard with one child of its own, the worker. When that ends, the keeper reports its exit status,
kills all children that it has then, and theirs, until there are none, and ends. As long as the worker lives, it reaps
those that have come to it.

The guard itself is what is left when keepers or the launching process are killed: it does the same to orphans of dead
keepers, and to everything once the launching process has ended or has hung up. The kernel ends workers with their
keeper, and wakes keepers and guards, frozen ones too, when their parent ends.

Guard, keepers and workers are of the process group and the session of the launching process, as every child is: the
scheduler shares processors out among sessions, and a call between two is slower by a tenth. So who kills that group
kills them all. What is left then is the *watcher*, the guard's parent in a session of its own: once the guard or the
launching process has ended, it kills and reaps everything below it. (A group of its own in the same session would not
do: with each child that ends the kernel may find the group of the script orphaned, and if anything is stopped in that,
it sends SIGHUP to all of it, see setpgid(2).)

This file is executed by itself, ``guard.py SOCKET_FD PARENT_PID``, and imports little: it starts in 20 ms. That process
is the watcher, the guard its fork. Fork servers import this file for their keepers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import marshal
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Container, Sequence
from typing import Any, NoReturn

PARENT = "PARENT_PID"
"""Stands in a command for the process id of the parent, which is known to the guard alone."""

FIRST_FD = 3
"""The number of the first descriptor that a command is started with besides the standard streams."""

EXIT_STATUS = struct.Struct("<i")
"""As `subprocess` counts: negative for a signal."""

NAME = b"skipper-guard"
"""Of guards and keepers, for ``ps``."""
WATCHER = b"skipper-watch"

_LENGTH = struct.Struct("<Q")
_INT = struct.Struct("i")
_RIGHTS = [socket.SOL_SOCKET, socket.SCM_RIGHTS]
_MOST_DESCRIPTORS = 8
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h
_OUT_OF_THE_WAY = 64
"""Descriptors that are to get certain numbers are put beyond this one first."""
PAUSE_S = 0.002
"""Between two looks at processes that have been killed and have not ended yet."""

_libc = ctypes.CDLL(None, use_errno=True)


def send_frame(connection: socket.socket, body: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send bytes; the receiver gets copies of the descriptors.

    Raises:
        OSError: the other end is gone, or does not read (`TimeoutError`).
    """
    data = memoryview(_LENGTH.pack(len(body)) + body)
    sent = socket.send_fds(connection, [data], descriptors) if descriptors else 0
    connection.sendall(data[sent:])


def receive_frame(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receive bytes, and the descriptors that came with them; the caller closes these.

    Raises:
        EOFError: the other end is gone.
        OSError: the same, nothing comes (`TimeoutError`), or there was no room for the descriptors.
    """
    # Not `socket.recv_fds`, which forgets the flags that it is given.
    room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * _INT.size)
    header, ancillary, flags, _ = connection.recvmsg(_LENGTH.size, room, socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL)
    received = [number for *kind, data in ancillary if kind == _RIGHTS for (number,) in _INT.iter_unpack(data)]
    try:
        if len(header) < _LENGTH.size:
            raise EOFError("the other end is gone")
        (nbytes,) = _LENGTH.unpack(header)
        body = bytearray()
        while len(body) < nbytes:
            chunk = connection.recv(min(nbytes - len(body), 1 << 20))
            if not chunk:
                raise EOFError("the other end is gone")
            body += chunk
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "no room for the descriptors of a new process")
    except BaseException:
        for descriptor in received:
            os.close(descriptor)
        raise
    return bytes(body), received


def fork_kept(tell: Callable[[int, int, int], None]) -> int:
    """Fork a keeper, and from it a process. Of one thread only.

    Args:
        tell: called in the keeper with the process id of the process, its pidfd, and the pipe that will bring its exit
            status and end once no descendant of it is left. It may raise `OSError`; then there was nobody to tell.

    Returns:
        In the new process 0; in the calling one the process id of the keeper, which is its child. Not in the keeper.

    Raises:
        OSError: the keeper, or in the keeper the process, cannot be made. In a keeper `tell` is called then, with the
            error's number in place of the first argument, negative.
    """
    parent = os.getpid()
    if keeper := os.fork():
        return keeper
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    keeper = os.getpid()
    try:
        _libc.prctl(_PR_SET_NAME, NAME, 0, 0, 0)
        wake_when_parent_ends()
        adopt_orphans()
        if os.getppid() != parent:
            os._exit(1)
        there, report = os.pipe()
        pid = os.fork()
        if pid == 0:
            die_with(keeper)
            signal.pthread_sigmask(signal.SIG_SETMASK, usual)
            os.close(there)
            os.close(report)
            return 0
        tell(pid, os.pidfd_open(pid), there)
    except OSError as error:
        if os.getpid() == keeper:
            with contextlib.suppress(OSError):
                tell(-(error.errno or errno.EAGAIN), -1, -1)
            end_orphans_until_none_is_left()
        os._exit(1)
    try:
        _keep(pid, report, parent)
    finally:  # with an error of this file's own, whose traceback nobody could read
        end_orphans_until_none_is_left()
        os._exit(1)
    raise AssertionError("not reached")


def _keep(pid: int, report: int, parent: int) -> NoReturn:
    """Be the keeper of one process until it has ended, or its parent has."""
    _close_all_but(report)
    while os.getppid() == parent:
        if (status := _bury_all_until(pid)) is not None:
            with contextlib.suppress(OSError):  # nobody wants to know
                os.write(report, EXIT_STATUS.pack(status))
            break
        signal.sigwait((signal.SIGCHLD, signal.SIGCONT))
    end_orphans_until_none_is_left()
    os._exit(0)


def _close_all_but(*kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # that of the list
                os.close(int(name))


def _bury_all_until(pid: int) -> int | None:
    """Reap the children that have ended; the exit status of this one if it is among them."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)
        if ended == 0:
            return None


def end_orphans_until_none_is_left() -> None:
    """Kill and reap all children, and those whose parent this process becomes by that."""
    while end_orphans():
        time.sleep(PAUSE_S)


def end_orphans(known: Container[int] = ()) -> bool:
    """Kill the children that are not known, and reap those that have ended.

    Returns:
        Whether there may be others: those that have not ended yet, or theirs.
    """
    left = False
    for pid in children():
        if pid in known:
            continue
        with contextlib.suppress(PermissionError):  # it has become another user's: out of reach
            os.kill(pid, signal.SIGKILL)
            left = True
        os.waitpid(pid, os.WNOHANG)
    return left


def children() -> list[int]:
    """The process ids of the children of this process, which has one thread; zombies included."""
    me = os.getpid()
    try:
        with open(f"/proc/self/task/{me}/children", "rb") as file:
            return [int(word) for word in file.read().split()]
    except FileNotFoundError:  # the kernel was built without it
        return [int(name) for name in os.listdir("/proc") if name.isdecimal() and _parent_of(name) == me]


def _parent_of(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def adopt_orphans() -> int:
    """Become the parent of descendants that lose theirs. An error's number where the kernel does not let us, else 0."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def wake_when_parent_ends() -> None:
    """Have the kernel continue this process, should it be stopped, when the thread that has started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that has started it ends; end now if that has happened.

    Raises:
        OSError: the kernel refuses.
    """
    if number := _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(number, "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> int:
    return ctypes.get_errno() if _libc.prctl(option, value, 0, 0, 0) != 0 else 0


class Keepers:
    """The keepers that this process has forked.

    Args:
        poll: gets the pidfds of the keepers, which become readable when these end.
    """

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self._pids: dict[int, int] = {}  # by pidfd

    def __len__(self) -> int:
        return len(self._pids)

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._pids

    def fork(self, tell: Callable[[int, int, int], None]) -> int:
        """`fork_kept`; the new process has no descriptors of others then.

        Raises:
            OSError: the keeper cannot be made, and so `tell` is not called.
        """
        place = os.eventfd(0, os.EFD_CLOEXEC)  # for the pidfd: later there may be no room
        try:
            keeper = fork_kept(tell)
        finally:
            os.close(place)
        if keeper == 0:
            for pidfd in self._pids:
                os.close(pidfd)
            return 0
        try:
            pidfd = os.pidfd_open(keeper)
        except OSError:  # no memory: who asked may have been told already, and finds it dead
            os.kill(keeper, signal.SIGKILL)
            return keeper
        self._pids[pidfd] = keeper
        self._poll.register(pidfd, select.POLLIN)
        return keeper

    def bury(self, pidfd: int) -> None:
        """Reap one that has ended."""
        self._poll.unregister(pidfd)
        os.waitpid(self._pids.pop(pidfd), 0)
        os.close(pidfd)

    def end_orphans(self) -> float | None:
        """Kill and reap all children but these. The milliseconds until there is reason to do so again; None: none."""
        return PAUSE_S * 1000 if end_orphans(self._pids.values()) else None


class Guard:
    """The guard's side.

    Args:
        connection: to the launching process.
        launching: the pidfd of that.
        usual: the signals that it blocks, and what it does about SIGCHLD: so it shall be in what is started.
    """

    def __init__(self, connection: socket.socket, launching: int, usual: tuple[set[int], Any]) -> None:
        self._connection = connection
        self._usual, self._on_child = usual
        self._poll = select.poll()
        self._keepers = Keepers(self._poll)
        self._launching = launching
        for descriptor in (connection.fileno(), launching):
            self._poll.register(descriptor, select.POLLIN)

    def serve(self) -> NoReturn:
        """Start what is asked for, until the other end hangs up or ends; then kill what is left, and end."""
        send_frame(self._connection, marshal.dumps((os.getpid(), adopt_orphans())))
        pause: float | None = None
        while True:
            for descriptor, _ in self._poll.poll(pause):
                if descriptor in self._keepers:
                    self._keepers.bury(descriptor)
                elif descriptor == self._launching or not self._answer():
                    end_orphans_until_none_is_left()
                    os._exit(0)
            pause = self._keepers.end_orphans()

    def _answer(self) -> bool:
        """Start one process; False where nobody asks any more."""
        try:
            body, descriptors = receive_frame(self._connection)
        except (EOFError, ConnectionError):
            return False
        except OSError as error:
            return self._reply(-(error.errno or errno.EIO))
        argv, environment = marshal.loads(body)
        failing, failed = os.pipe()

        def tell(pid: int, *handles: int) -> None:
            os.close(failed)
            if pid > 0 and (code := os.read(failing, EXIT_STATUS.size)):  # else it ends with the execution
                pid, handles = -EXIT_STATUS.unpack(code)[0], ()
            self._reply(pid, *handles if pid > 0 else ())

        try:
            if self._keepers.fork(tell):
                return True
            self._execute(argv, environment, descriptors, failed)
        except OSError as error:
            return self._reply(-(error.errno or errno.EAGAIN))
        finally:
            for descriptor in (*descriptors, failing, failed):
                os.close(descriptor)

    def _reply(self, pid: int, *handles: int) -> bool:
        try:
            send_frame(self._connection, marshal.dumps(pid), handles)
        except ConnectionError:
            return False
        return True

    def _execute(
        self, argv: list[bytes], environment: dict[bytes, bytes], descriptors: Sequence[int], failed: int
    ) -> NoReturn:
        """Become what was asked for; the descriptors are those of its directory, its output, its errors, and others."""
        try:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # the interpreter ignores them
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGCHLD, self._on_child)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._usual)
            directory, *rest = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY) for fd in descriptors)
            failed = fcntl.fcntl(failed, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY)
            os.fchdir(directory)
            for place, descriptor in enumerate(rest, start=1):  # 0 is this process' own: nothing
                os.dup2(descriptor, place)
            parent = str(os.getppid()).encode()
            os.execve(argv[0], [parent if word == PARENT.encode() else word for word in argv], environment)
        except OSError as error:
            os.write(failed, EXIT_STATUS.pack(error.errno or errno.EINVAL))
        finally:
            os._exit(1)
        raise AssertionError("not reached")


def _watch(guard: int, launching: int) -> NoReturn:
    """Be the watcher of a guard, a child of this process, and of what has started that; pidfd `launching`."""
    os.setsid()
    guard_pidfd = os.pidfd_open(guard)
    _close_all_but(guard_pidfd, launching)
    poll = select.poll()
    for descriptor in (guard_pidfd, launching):
        poll.register(descriptor, select.POLLIN)
    poll.poll()
    _bury_all_until(guard)
    end_orphans_until_none_is_left()
    os._exit(0)


def main() -> None:
    """Be a watcher, and in a fork of it the guard."""
    descriptor, parent = map(int, sys.argv[1:])
    wake_when_parent_ends()
    adopt_orphans()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    # Where the script ignores its children's ends there would be nobody to bury. None: a handler in C.
    on_child: Any = signal.signal(signal.SIGCHLD, signal.SIG_DFL) or signal.SIG_DFL
    try:
        launching = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    if os.getppid() != parent:
        os._exit(1)
    if guard := os.fork():
        _libc.prctl(_PR_SET_NAME, WATCHER, 0, 0, 0)
        _watch(guard, launching)
    _libc.prctl(_PR_SET_NAME, NAME, 0, 0, 0)
    wake_when_parent_ends()
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    Guard(connection, launching, (blocked, on_child)).serve()


if __name__ == "__main__":
    main()
