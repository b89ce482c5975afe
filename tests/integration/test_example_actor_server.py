"""Actors in Python, called from JavaScript with nothing but gRPC and the protobuf file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.example_process import ROOT, ExampleProcess, running, wait_until

FILES = ("examples/actor_server", "control/wire/proto")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client with its packages, in a folder of its own that is laid out as the checkout."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("needs Node.js and npm")
    root = tmp_path_factory.mktemp("checkout")
    for folder in FILES:
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("node_modules", "__pycache__"))
    folder = root / FILES[0]
    install = [
        npm,
        "install",
        "--no-audit",
        "--no-fund",
        "--no-package-lock",
        "--ignore-scripts",
        "--cache",
        str(root / "npm"),
    ]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=100)
    if done.returncode != 0:
        pytest.skip(f"needs packages from npm: {done.stderr[-500:]}")
    return folder / "client.mjs"


@pytest.fixture(scope="module")
def server(client: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ExampleProcess, Path]]:
    """A running server, and the file with its secret."""
    secret = tmp_path_factory.mktemp("secret") / "secret"
    with running("-m", "examples.actor_server.server", str(secret)) as example:
        wait_until(lambda: example.out or example.process.poll() is not None, 30.0, lambda: example.stderr)
        yield example, secret


def call(client: Path, server: ExampleProcess, secret: Path) -> subprocess.CompletedProcess[str]:
    command = ["node", str(client), server.stdout.strip(), str(secret)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_caller_in_javascript_gets_results_of_an_object_and_of_a_mesh_and_errors_with_their_type(
    client: Path, server: tuple[ExampleProcess, Path]
) -> None:
    done = call(client, *server)
    assert done.stdout.splitlines() == [
        "1 + 2: the models say 3 and 3",
        "20 + 22: the models say 42 and 43",
        "30 + 12: the models say 42 and 43",
        "mean reward 0.67",
        "RAISED: KeyError: 'there is no task 99'",
    ], done.stderr
    assert done.returncode == 0


def test_a_caller_with_another_secret_takes_nothing_from_the_server(
    client: Path, server: tuple[ExampleProcess, Path], tmp_path: Path
) -> None:
    other = tmp_path / "secret"
    other.write_bytes(os.urandom(32))
    done = call(client, server[0], other)
    assert done.returncode != 0
    assert "does not know the secret of this client" in done.stderr
    assert done.stdout == ""


def test_the_server_ends_in_good_order_at_ctrl_c(server: tuple[ExampleProcess, Path]) -> None:
    example, _ = server
    example.process.send_signal(signal.SIGINT)
    assert example.wait(20.0) == 0, example.stderr
    example.assert_nobody_left()
    assert example.stderr == ""
