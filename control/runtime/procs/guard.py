"""The guard: a small process between a launching process and its children. No descendant of theirs outlives them.

Processes that an actor has started, and their descendants, stay alive when their parent ends: the kernel gives them
another parent, the nearest ancestor that has asked for it (``PR_SET_CHILD_SUBREAPER`` of prctl(2)). Here that is a
*keeper*, a fork of the guard with one child of its own, the worker. When the worker ends, the keeper reports its exit
status, kills all its children and theirs until there are none, and ends. While the worker lives, the keeper reaps the
orphans that it has got.

The guard itself is for the case that keepers or the launching process are killed: it does the same to orphans of dead
keepers, and to everything once the launching process has ended or closed the connection. The kernel ends workers with
their keeper, and wakes keepers and guards, even frozen ones, when their parent ends.

Guard, keepers and workers are in the process group and the session of the launching process, like every child: the
scheduler distributes processors among sessions, and a call between two sessions is slower by a tenth. So a signal to
that group kills them all. Then only the *watcher* is left, the guard's parent, which has a session of its own: once the
guard or the launching process has ended, it kills and reaps everything below it. (A group of its own in the same
session is not enough: with each child that ends the kernel may find the script's group orphaned, and if a process in it
is stopped, it sends SIGHUP to the whole group, see setpgid(2).)

This file is executed by itself, ``guard.py SOCKET_FD PARENT_PID``, and imports little: it starts in 20 ms. That process
is the watcher, and its fork is the guard. Fork servers import this file for their keepers.
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
"""Placeholder in a command for the process id of the parent, which only the guard knows."""

FIRST_FD = 3
"""The number of the first descriptor of a command after the standard streams."""

EXIT_STATUS = struct.Struct("<i")
"""As `subprocess` counts: negative for a signal."""

NAME = b"skipper-guard"
"""The name of guards and keepers, for ``ps``."""
WATCHER = b"skipper-watch"

_LENGTH = struct.Struct("<Q")
_INT = struct.Struct("i")
_RIGHTS = [socket.SOL_SOCKET, socket.SCM_RIGHTS]
_MOST_DESCRIPTORS = 8
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h
_OUT_OF_THE_WAY = 64
"""Descriptors that need certain numbers are first moved beyond this one."""
PAUSE_S = 0.002
"""The pause between two looks at processes that were killed and have not ended yet."""

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
        OSError: the other end is gone, nothing comes (`TimeoutError`), or there was no room for the descriptors.
    """
    # Not `socket.recv_fds`, which ignores its flags.
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
    """Fork a keeper, and from it a process with one thread.

    Args:
        tell: called in the keeper with the process id of the process, its pidfd, and the pipe that will bring its exit
            status and end once no descendant of it is left. It may raise `OSError` if there is no receiver.

    Returns:
        In the new process 0; in the calling one the process id of the keeper, its child. It does not return in the
        keeper.

    Raises:
        OSError: the keeper, or the process in the keeper, cannot be made. In the keeper `tell` is then called with the
            negative error number as its first argument.
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
    finally:  # after an error in this file, whose traceback nobody could read
        end_orphans_until_none_is_left()
        os._exit(1)
    raise AssertionError("not reached")


def _keep(pid: int, report: int, parent: int) -> NoReturn:
    """Run as the keeper of one process until that, or the keeper's parent, has ended."""
    _close_all_but(report)
    while os.getppid() == parent:
        if (status := _bury_all_until(pid)) is not None:
            with contextlib.suppress(OSError):  # nobody reads it
                os.write(report, EXIT_STATUS.pack(status))
            break
        signal.sigwait((signal.SIGCHLD, signal.SIGCONT))
    end_orphans_until_none_is_left()
    os._exit(0)


def _close_all_but(*kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the descriptor of the list
                os.close(int(name))


def _bury_all_until(pid: int) -> int | None:
    """Reap the children that have ended; returns the exit status of this one if it is among them."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)
        if ended == 0:
            return None


def end_orphans_until_none_is_left() -> None:
    """Kill and reap all children, and the processes whose parent this process then becomes."""
    while end_orphans():
        time.sleep(PAUSE_S)


def end_orphans(known: Container[int] = ()) -> bool:
    """Kill the children that are not known, and reap the ones that have ended.

    Returns:
        Whether there may be more: children that have not ended yet, or their children.
    """
    left = False
    for pid in children():
        if pid in known:
            continue
        with contextlib.suppress(PermissionError):  # it belongs to another user now: out of reach
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
    except FileNotFoundError:  # the kernel was built without this file
        return [int(name) for name in os.listdir("/proc") if name.isdecimal() and _parent_of(name) == me]


def _parent_of(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def adopt_orphans() -> int:
    """Become the parent of orphaned descendants. Returns the error number if the kernel refuses, else 0."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def wake_when_parent_ends() -> None:
    """Make the kernel continue this process, if it is stopped, when the thread that has started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def die_with(parent: int) -> None:
    """Make the kernel kill this process when the thread that has started it ends; end now if that has happened.

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
        poll: gets the pidfds of the keepers, which become readable when the keepers end.
    """

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self._pids: dict[int, int] = {}  # by pidfd

    def __len__(self) -> int:
        return len(self._pids)

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._pids

    def fork(self, tell: Callable[[int, int, int], None]) -> int:
        """`fork_kept`; the new process then has no descriptors of others.

        Raises:
            OSError: the keeper cannot be made, and so `tell` is not called.
        """
        place = os.eventfd(0, os.EFD_CLOEXEC)  # a place for the pidfd: later there may be no room
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
        except OSError:  # no memory: the client may have its answer already, and finds the process dead
            os.kill(keeper, signal.SIGKILL)
            return keeper
        self._pids[pidfd] = keeper
        self._poll.register(pidfd, select.POLLIN)
        return keeper

    def bury(self, pidfd: int) -> None:
        """Reap a keeper that has ended."""
        self._poll.unregister(pidfd)
        os.waitpid(self._pids.pop(pidfd), 0)
        os.close(pidfd)

    def end_orphans(self) -> float | None:
        """Kill and reap all children but these. Returns the milliseconds until the next call is needed; None: never."""
        return PAUSE_S * 1000 if end_orphans(self._pids.values()) else None


class Guard:
    """The guard's side.

    Args:
        connection: to the launching process.
        launching: the pidfd of the launching process.
        usual: the signals that it blocks, and its handling of SIGCHLD: processes that it starts get the same.
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
        """Start requested processes until the other end closes the connection or ends; then kill the rest, and end."""
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
        """Start one process; False if there are no more requests."""
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
            if pid > 0 and (code := os.read(failing, EXIT_STATUS.size)):  # otherwise the pipe closes with the execution
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
        """Execute the command; the descriptors are those of its directory, its output, its errors, and others."""
        try:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # the interpreter ignores them
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGCHLD, self._on_child)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._usual)
            directory, *rest = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY) for fd in descriptors)
            failed = fcntl.fcntl(failed, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY)
            os.fchdir(directory)
            for place, descriptor in enumerate(rest, start=1):  # 0 stays this process' own, which is empty
                os.dup2(descriptor, place)
            parent = str(os.getppid()).encode()
            os.execve(argv[0], [parent if word == PARENT.encode() else word for word in argv], environment)
        except OSError as error:
            os.write(failed, EXIT_STATUS.pack(error.errno or errno.EINVAL))
        finally:
            os._exit(1)
        raise AssertionError("not reached")


def _watch(guard: int, launching: int) -> NoReturn:
    """Run as the watcher of a guard, a child of this process, and of the launching process with pidfd `launching`."""
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
    """Run as a watcher, and in a fork of it as the guard."""
    descriptor, parent = map(int, sys.argv[1:])
    wake_when_parent_ends()
    adopt_orphans()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    # If the script ignored its children's ends, there would be none to reap. None: a handler in C.
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
