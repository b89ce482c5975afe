"""Actors of Ray that read each other's tensors."""

from __future__ import annotations

import tempfile

import pytest

from tests.integration.example_process import run

pytestmark = pytest.mark.timeout(300)  # where the machine is busy, Ray alone takes half a minute to start


def test_weights_go_between_actors_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray would leave a token in the user's home
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # paths of Ray's sockets are short
        monkeypatch.setenv("RAY_TMPDIR", folder)
        example = run("-m", "examples.ray_tensors", "--steps", "2", "--nbytes", "4096", timeout=280)
    assert example.process.returncode == 0, example.stderr
    assert example.stdout.splitlines()[-1] == "2 steps, every element as expected after each"
    assert [line.split(":")[0].strip() for line in example.stdout.splitlines()[:2]] == ["skipper", "object store"]
