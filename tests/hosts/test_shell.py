"""A shell on a host, in the terminal of a script: here a pseudo-terminal of the test."""

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from skipper.control import ActorError, HostMesh, this_host
from skipper.control.cluster.hosts import attach_to_hosts, shell
from tests.control.conftest import PATIENCE_S, wait_until
from tests.hosts.conftest import LocalAgents, environment
from tests.hosts.netns import REPOSITORY

SCRIPT = Path(__file__).with_name("shell_script.py")


class Session:
    """A script with a terminal, and this side of that."""

    def __init__(self, *arguments: str) -> None:
        self.fd, theirs = pty.openpty()
        self.output = ""
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=REPOSITORY,
            env=environment(),
            start_new_session=True,
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait_for(self, text: str) -> None:
        """Read on until it has come since the last time."""
        while text not in self.output:
            try:
                data = os.read(self.fd, 4096)
            except OSError:
                data = b""
            assert data, f"{text!r} did not come: {self.output}"
            self.output += data.decode()
        self.output = self.output.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


@pytest.fixture
def session() -> Iterator[Callable[..., Session]]:
    sessions: list[Session] = []

    def start(*arguments: str) -> Session:
        sessions.append(Session(*arguments))
        return sessions[-1]

    yield start
    for started in sessions:
        started.close()


def test_a_shell_on_a_host_has_the_terminal_of_the_script(
    local_agent: LocalAgents, secret_file: Path, session: Callable[..., Session]
) -> None:
    here = session(local_agent("127.0.0.4"), str(secret_file))
    here.wait_for("ready> ")
    here.type("echo $((6 * 7)) $PWD; tty\n")
    here.wait_for(f"42 {os.getcwd()}")
    here.wait_for("/dev/pts/")
    fcntl.ioctl(here.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
    here.type("until stty size | grep '33 99'; do sleep .01; done\n")
    here.wait_for("33 99\r")
    here.type("trap 'echo int''errupted' INT; sh -c \"echo be''gun; exec sleep 60\"\n")
    here.wait_for("begun")
    here.type("\x03")
    here.wait_for("interrupted")
    here.type("exit 3\n")
    here.wait_for("ended with 3")
    assert here.process.wait(PATIENCE_S) == 0


def test_a_shell_and_what_runs_in_it_end_with_the_script(session: Callable[..., Session]) -> None:
    here = session()
    here.wait_for("ready> ")
    here.type("sleep 1001\n")
    wait_until(lambda: any("1001" in _words(child) for child in _below(here)), "the command runs")
    below = _below(here)
    here.process.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(child.is_running() and child.status() != "zombie" for child in below), "all have ended")


def _below(here: Session) -> list[psutil.Process]:
    return psutil.Process(here.process.pid).children(recursive=True)


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


@pytest.fixture
def no_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Gives the script a file as standard input, and another as output."""
    with contextlib.ExitStack() as files:

        def give(text: str) -> Path:
            (tmp_path / "in").write_text(text)
            monkeypatch.setattr(sys, "stdin", files.enter_context(open(tmp_path / "in")))
            monkeypatch.setattr(sys, "stdout", files.enter_context(open(tmp_path / "out", "w")))
            return tmp_path / "out"

        yield give


def test_input_that_ends_ends_the_shell(no_terminal: Callable[[str], Path]) -> None:
    output = no_terminal("echo $((6 * 7)) $EXTRA\n")
    assert shell(this_host(), command=("/bin/sh",), env={"EXTRA": "more"}, workdir="/") == 0
    assert "42 more" in output.read_text()


def test_the_status_is_the_commands(no_terminal: Callable[[str], Path], tmp_path: Path) -> None:
    output = no_terminal("")
    assert shell(this_host(), command=("/bin/sh", "-c", "kill -9 $$")) == 128 + 9
    assert shell(this_host(), command=("no-such-command",)) == 127
    assert "no-such-command: No such file" in output.read_text()
    flood = (
        "i=0; while [ $i -lt 3000 ]; do echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa; i=$((i+1)); done; exit 4"
    )
    assert shell(this_host(), command=("/bin/sh", "-c", flood)) == 4
    assert output.read_text().count("aaaa\n") == 3000
    with pytest.raises(ActorError, match="FileNotFoundError"):
        shell(this_host(), workdir=str(tmp_path / "nowhere"))


def test_a_shell_runs_on_one_host(local_agent: LocalAgents, secret_file: Path) -> None:
    hosts: HostMesh = attach_to_hosts([local_agent("127.0.0.2"), local_agent("127.0.0.3")], secret_file=secret_file)
    with pytest.raises(ValueError, match=r"one host, these are 2.*slice\(hosts=0\)"):
        shell(hosts)
