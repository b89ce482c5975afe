"""Agents that take over a listening socket which somebody else has opened."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skipper import control
from skipper.control.cluster.hosts import adopted, attach_to_hosts, command
from skipper.control.wire.socket_forwarder import SocketForwarder
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S
from tests.hosts.conftest import environment
from tests.hosts.netns import REPOSITORY, SKIPPER

SYSTEMD = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Passes a descriptor on in the way of systemd, and then executes a command."""

StartAgent = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.2", 0)) as server:
        yield server


@pytest.fixture
def start(secret_file: Path) -> Iterator[StartAgent]:
    agents: list[subprocess.Popen[str]] = []

    def run(server: socket.socket, *options: str, by: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        words = [*by, *SKIPPER, "host", "serve", "--secret-file", str(secret_file), *options]
        agents.append(
            subprocess.Popen(
                words,
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                text=True,
                env=environment(),
                pass_fds=(server.fileno(),),
            )
        )
        return agents[-1]

    yield run
    control.shutdown()
    for agent in agents:
        agent.terminate()
        with agent:
            assert agent.wait(PATIENCE_S) in (0, -signal.SIGTERM)


@pytest.mark.parametrize("way", ["--fd", "LISTEN_FDS"])
def test_an_agent_takes_over_a_socket_that_scripts_already_dial(
    way: str, listening: socket.socket, start: StartAgent, secret_file: Path
) -> None:
    number = str(listening.fileno())
    agent = (
        start(listening, "--fd", number)
        if way == "--fd"
        else start(listening, by=(sys.executable, "-c", SYSTEMD, number))
    )
    # Nobody has waited for the agent: the kernel keeps those who dial until it is there.
    host, port = listening.getsockname()
    hosts = attach_to_hosts(f"tcp://{host}:{port}", secret_file=secret_file, timeout=PATIENCE_S)
    assert agent.stdout is not None
    assert agent.stdout.readline() == f"serving at tcp://{host}:{port}\n"
    worker = hosts.spawn_procs().spawn("worker", Echo)
    assert worker.echo.call_one(b"x" * (1 << 20)).get(PATIENCE_S) == b"x" * (1 << 20)
    # What the agent starts is told of none of it.
    assert worker.run.call_one(os.environ.get, "LISTEN_FDS").get(PATIENCE_S) is None
    hosts.stop().get(PATIENCE_S)
    agent.terminate()
    assert agent.wait(PATIENCE_S) == 0


def test_what_is_no_listening_socket_is_refused(secret_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve = ["serve", "--secret-file", str(secret_file)]

    def refused(*options: str) -> str:
        assert command.main([*serve, *options]) == (1 if len(options) == 2 else 2)
        return capsys.readouterr().err

    assert "--fd N" in refused()
    assert "not both" in refused("--address", "tcp://127.0.0.2:0", "--fd", "3")
    with socket.socket() as idle, open(secret_file, "rb") as file:
        assert "not a TCP socket that listens" in refused("--fd", str(idle.fileno()))
        assert idle.fileno() > 0
        assert "not a socket" in refused("--fd", str(file.fileno()))


def test_other_machines_are_not_listened_to_without_tls(secret_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        assert command.main(["serve", "--secret-file", str(secret_file), "--fd", str(os.dup(everywhere.fileno()))]) == 1
    assert "--certs" in capsys.readouterr().err


def test_only_one_socket_meant_for_this_process_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_PID", "1")
    assert adopted.passed_on() is None
    assert "LISTEN_FDS" not in os.environ
    monkeypatch.setenv("LISTEN_FDS", "2")
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    with pytest.raises(ValueError, match="and 2 were passed to it"):
        adopted.passed_on()


def test_a_relay_passes_on_bytes_and_ends_and_closes_what_it_has() -> None:
    name = f"skipper-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as outer, socket.socket(socket.AF_UNIX) as inner:
        inner.bind(f"\0{name}")
        inner.listen()
        forwarder = SocketForwarder(outer.dup(), name)
        with socket.create_connection(outer.getsockname(), PATIENCE_S) as client:
            there, _ = inner.accept()
            with there:
                there.settimeout(PATIENCE_S)
                client.sendall(b"question")
                client.shutdown(socket.SHUT_WR)
                assert b"".join(iter(lambda: there.recv(99), b"")) == b"question"
                there.sendall(b"answer")
                there.close()
                assert b"".join(iter(lambda: client.recv(99), b"")) == b"answer"
        with socket.create_connection(outer.getsockname(), PATIENCE_S) as client:
            there, _ = inner.accept()
            with there:
                forwarder.close()
                forwarder.close()
                there.settimeout(PATIENCE_S)
                assert there.recv(1) == b""
                assert client.recv(1) == b""
