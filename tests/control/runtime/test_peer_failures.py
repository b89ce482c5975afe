"""What is known of dead processes does not grow for ever, and their references still end calls."""

from collections.abc import Callable

import pytest

from skipper.control import Actor, ProcMesh, SupervisionError, endpoint
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime import peer_failures
from tests.control.conftest import PATIENCE_S, wait_until


class Worker(Actor):
    @endpoint
    def ping(self) -> str:
        return "pong"


def test_records_of_dead_processes_are_bounded(
    own_procs: Callable[..., ProcMesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_failures, "_KEPT_REASONS", 2)
    process = runtime.current()
    dead = []
    for _ in range(4):
        procs = own_procs()
        worker = procs.spawn("worker", Worker)
        assert worker.ping.call_one().get(PATIENCE_S) == "pong"
        procs.stop().get(PATIENCE_S)
        dead.append(worker)
    wait_until(lambda: len(process.peer_failures._exit_reasons._known) == 2, "the obituary of the last")
    assert len(process.transport._links) <= 2
    assert len(process.children._children) <= 2
    for worker in (dead[-1], dead[0]):  # one that is known, one that is forgotten
        with pytest.raises(SupervisionError):
            worker.ping.call_one().get(PATIENCE_S)
