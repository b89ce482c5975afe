"""`shell`: a terminal on a host, in the terminal of the script."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import struct
import subprocess
import sys
import termios
import threading
import tty
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from skipper.control.api.actor import Actor, endpoint
from skipper.control.api.mesh import HostMesh
from skipper.control.model.errors import ControlError
from skipper.control.observe import terminal_line
from skipper.control.runtime.port import Channel, Port, PortReceiver

_CHUNK_NBYTES = 16 << 10
_AHEAD_NBYTES = 1 << 20
"""A command waits once it has written this much that is not shown yet."""

_GRACE_S = 1.0
"""How long programs in the terminal have to end after SIGHUP before they are killed."""

_END_OF_INPUT = b"\x04"
"""Ctrl-D, VEOF of termios(3): the end of the input for a terminal."""

_SIZE_WITHOUT_TERMINAL = (24, 80)

_IN_TERMINAL = """
import fcntl, os, signal, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    sys.stderr.write(f"{sys.argv[1]}: {error.strerror}\\n")
    sys.exit(127)
"""
"""Run by Python in the new process: makes standard input its controlling terminal, resets signals to their defaults
(the processes of a mesh ignore SIGINT, and Python ignores SIGPIPE), and executes the command."""

Size: TypeAlias = tuple[int, int]
"""Lines and columns."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """A message: this many bytes of the output have been shown."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """The command to run.

    Attributes:
        command: the command and its arguments; empty: the user's shell there.
        env: environment variables besides those of the processes of the host.
        workdir: where it runs; None: in ``local_workdir`` if the host has a folder of that name.
        local_workdir: where the script runs.
        size: of the terminal.
    """

    command: tuple[str, ...]
    env: dict[str, str]
    workdir: str | None
    local_workdir: str
    size: Size


class Terminal(Actor):
    """One terminal on a host, and the programs in it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._master = -1
        self._receiver: PortReceiver[bytes | Size | _Shown] | None = None
        self._ahead = 0
        self._room = threading.Condition()

    @endpoint
    def open(self, output: Port[bytes | int], wanted: ShellCommand) -> Port[bytes | Size | _Shown]:
        """Run a command in a new terminal.

        Args:
            output: gets the output, and finally the exit status.
            wanted: the command.

        Returns:
            The port for typed input, changes of the size, and how much of the output has been shown.

        Raises:
            OSError: it cannot be run, or there is no such folder.
        """
        self._master, slave = os.openpty()
        try:
            _set_size(self._master, wanted.size)
            command = wanted.command or (os.environ.get("SHELL", "/bin/sh"), "-i")
            here = wanted.local_workdir if os.path.isdir(wanted.local_workdir) else None
            self._process = subprocess.Popen(
                [sys.executable, "-IS", "-c", _IN_TERMINAL, *command],
                stdin=slave,
                stdout=slave,
                stderr=slave,
                cwd=wanted.workdir if wanted.workdir is not None else here,
                env={**os.environ, **wanted.env},
            )
        finally:
            os.close(slave)
        port, self._receiver = Channel[bytes | Size | _Shown].open()
        threading.Thread(target=self._read, args=(output, self._process), name="shell-output", daemon=True).start()
        threading.Thread(target=self._write, args=(self._receiver,), name="shell-input", daemon=True).start()
        return port

    def __cleanup__(self, error: Exception | None) -> None:
        """Close the terminal."""
        if self._process is not None:
            _hang_up(self._process, self._master)
        with self._room:
            self._ahead = -sys.maxsize  # so that no thread waits for room any more
            self._room.notify_all()
        if self._receiver is not None:
            self._receiver.close()

    def _read(self, output: Port[bytes | int], process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ControlError):  # this process leaves the job
            while data := _read_terminal(self._master):
                with self._room:
                    self._room.wait_for(lambda: self._ahead < _AHEAD_NBYTES)
                    self._ahead += len(data)
                output.send(data)
            status = process.wait()
            output.send(status if status >= 0 else 128 - status)

    def _write(self, receiver: PortReceiver[bytes | Size | _Shown]) -> None:
        with contextlib.suppress(
            ControlError, OSError
        ):  # the channel is closed, or no program reads the terminal any more
            while True:
                said = receiver.recv().get()
                if isinstance(said, _Shown):
                    with self._room:
                        self._ahead -= said.nbytes
                        self._room.notify_all()
                elif isinstance(said, bytes):
                    while said:
                        said = said[os.write(self._master, said) :]
                else:
                    _set_size(self._master, said)


def shell(
    host: HostMesh, *, env: Mapping[str, str] | None = None, workdir: str | None = None, command: Sequence[str] = ()
) -> int:
    """Run a shell on a host in the terminal of this script, until it ends.

    The shell gets what you type, including Ctrl-C, and changes of the terminal's size; if standard input is not a
    terminal, its end is the end of the shell's input. The shell runs in a process of its own on the host, which is
    stopped with it.

    Args:
        host: one host: `this_host`, or a slice of attached ones.
        env: environment variables for the shell, in addition to those that processes on the host have.
        workdir: the folder where it runs; None: the path of the script's folder, if the host has one.
        command: the command to run in place of ``$SHELL -i``.

    Returns:
        The exit status of the shell; 128 plus the number of the signal that has ended it; 127 if the command cannot be
        executed.

    Raises:
        ValueError: these are several hosts.
        ActorError: there is no folder ``workdir``, or no free terminal; its cause is the `OSError`.
        SupervisionError: the host, or the process there, is gone.
    """
    if len(host) != 1:
        raise ValueError(f"a shell runs on one host, these are {len(host)}: take one by hosts.slice(hosts=0)")
    source, sink = sys.stdin.fileno(), sys.stdout.fileno()
    variables = {"TERM": os.environ.get("TERM", "xterm-256color"), **(env or {})}
    procs = host.spawn_procs(name="shell")
    try:
        terminal = procs.spawn("terminal", Terminal)
        output, receiver = Channel[bytes | int].open()
        output.link(terminal)
        wanted = ShellCommand(tuple(command), variables, workdir, os.getcwd(), _size_of(source))
        to_shell: Port[Any] = terminal.open.call_one(output, wanted).get()
        with terminal_line.none_meanwhile(), _raw(source), _typing(source, to_shell):
            while isinstance(said := receiver.recv().get(), bytes):
                _write_all(sink, said)
                to_shell.send(_Shown(len(said)))
        return said
    finally:
        procs.stop().get()


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _read_terminal(master: int) -> bytes:
    """The next output; empty at the end."""
    try:
        return os.read(master, _CHUNK_NBYTES)
    except OSError:  # EIO: no process has the other end open any more (pty(7)); or it was closed here
        return b""


def _hang_up(process: subprocess.Popen[bytes], master: int) -> None:
    """End the programs in a terminal: the foreground group, and the session's first process."""
    groups = {process.pid}
    with contextlib.suppress(OSError):
        groups.add(os.tcgetpgrp(master))
    for number in (signal.SIGHUP, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)  # in case it does not have a group of its own yet
            for group in groups:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
    process.wait()
    os.close(master)


def _set_size(fd: int, size: Size) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))


def _size_of(fd: int) -> Size:
    try:
        size = os.get_terminal_size(fd)
    except OSError:
        return _SIZE_WITHOUT_TERMINAL
    return size.lines, size.columns


@contextlib.contextmanager
def _raw(fd: int) -> Iterator[None]:
    """Put a terminal into raw mode; does nothing if ``fd`` is not a terminal."""
    if not os.isatty(fd):
        yield
        return
    before = termios.tcgetattr(fd)
    tty.setraw(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _typing(source: int, to_shell: Port[Any]) -> Iterator[None]:
    """Send typed input, and changes of the size, in a thread that stops reading when this context ends."""
    over, resized = (os.eventfd(0, os.EFD_CLOEXEC) for _ in range(2))
    thread = threading.Thread(
        target=_send_input, args=(source, to_shell, over, resized), name="shell-typing", daemon=True
    )
    thread.start()
    try:
        with _resizing(source, resized):
            yield
    finally:
        os.eventfd_write(over, 1)
        thread.join()
        os.close(over)
        os.close(resized)


def _send_input(source: int, to_shell: Port[Any], over: int, resized: int) -> None:
    with selectors.SelectSelector() as selector:  # epoll does not accept regular files
        for fd in (source, over, resized):
            selector.register(fd, selectors.EVENT_READ)
        while over not in (ready := {key.fd for key, _ in selector.select()}):
            if resized in ready:
                os.eventfd_read(resized)
                to_shell.send(_size_of(source))
            if source not in ready:
                continue
            try:
                data = os.read(source, _CHUNK_NBYTES)
            except OSError:  # the terminal of the script is gone
                data = b""
            to_shell.send(data or _END_OF_INPUT)
            if not data:
                selector.unregister(source)


@contextlib.contextmanager
def _resizing(source: int, resized: int) -> Iterator[None]:
    """Write to ``resized`` when the script's terminal changes its size; in the main thread, which gets signals."""
    if threading.current_thread() is not threading.main_thread() or not os.isatty(source):
        yield
        return
    before = signal.signal(signal.SIGWINCH, lambda number, frame: os.eventfd_write(resized, 1))
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
