"""Engines that outlive their trainers: they join the next one's job, and nothing of the last one is left in them."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from skipper.control.cluster.hosts import command as host_command
from tests.control.conftest import wait_until
from tests.freezing import freeze
from tests.torchstore.sync_process import SyncProcess

REPOSITORY = Path(__file__).parents[2]
Starts = Callable[..., SyncProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starts]:
    """Starts a trainer or an engine; those of one test find each other."""
    host_command.main(["secret", str(tmp_path / "secret")])
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SKIPPER_")},
        "XDG_RUNTIME_DIR": str(tmp_path),
        "SKIPPER_SECRET_FILE": str(tmp_path / "secret"),
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as stack:

        def start() -> SyncProcess:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process = subprocess.Popen(SyncProcess.COMMAND, cwd=REPOSITORY, env=environment, **pipes)  # type: ignore[call-overload]
            return stack.enter_context(SyncProcess(process))

        yield start


@pytest.mark.timeout(400)  # seven processes that import torch, on a busy machine
def test_five_trainers_in_succession_feed_the_same_engines_which_do_not_grow(start: Starts) -> None:
    engines = [start(), start()]
    held: list[list[dict[str, int]]] = []
    for number in range(1, 6):
        with start() as trainer:
            address = trainer.do("serve")
            for engine in engines:
                assert engine.do("join", address=address) is True
            for step in (1, 2):
                version = trainer.do("put", value=10 * number + step, mode="direct")
                assert version == step
                for engine in engines:
                    assert engine.do("load", after=step - 1) == [step, 10 * number + step, 10 * number + step]
            trainer.kill()
        held.append([engine.do("resources") for engine in engines])
    for first, last in zip(held[1], held[-1], strict=True):
        assert last == first


def test_an_engine_leaves_a_trainer_that_lives_when_it_is_told_to(start: Starts) -> None:
    first, second, engine = start(), start(), start()
    addresses = [first.do("serve"), second.do("serve")]
    for trainer, value in ((first, 1), (second, 2)):
        trainer.do("put", value=value)
    assert engine.do("join", address=addresses[0]) is True
    assert engine.do("join", address=addresses[0]) is False
    assert engine.do("sync")[:2] == [1, 1]
    with pytest.raises(RuntimeError, match=r"AlreadyInJobError: .* a job that runs"):
        engine.do("join", address=addresses[1])
    assert engine.do("join", address=addresses[1], replace=True) is True
    assert engine.do("sync")[:2] == [1, 2]
    wait_until(lambda: first.do("members") == 0, "the first trainer knows that the engine has left")
    assert engine.do("leave") is True
    assert engine.do("leave") is False
    assert engine.do("join", address=addresses[0]) is True  # back again
    assert engine.do("sync")[:2] == [1, 1]


def test_the_lease_of_an_engine_that_leaves_in_the_middle_of_a_read_ends(start: Starts) -> None:
    trainer, engine = start(), start()
    address = trainer.do("serve")
    trainer.do("put", value=1, mode="direct")
    engine.do("join", address=address)
    assert engine.do("hold") == 1
    assert trainer.do("leases") == 1
    engine.do("leave")
    trainer.do("fence", timeout=20)
    assert trainer.do("leases") == 0


@pytest.mark.timeout(200)
@pytest.mark.parametrize("mode", ["direct", "snapshot"])
def test_a_stopped_engine_holds_nobody_up_for_longer_than_the_heartbeat(start: Starts, mode: str) -> None:
    trainer, stopped, other = start(), start(), start()
    trainer.do("configure", heartbeat_s=1.0)
    address = trainer.do("serve")
    trainer.do("put", value=1, mode=mode)
    for engine in (stopped, other):
        engine.do("join", address=address)
    assert stopped.do("hold") == 1
    freeze(stopped.process.pid)
    trainer.do("fence", timeout=20)
    for version in (2, 3, 4):  # more than the arenas between which a trainer alternates
        assert trainer.do("put", value=version, mode=mode) == version
        assert other.do("sync", after=version - 1)[:2] == [version, version]
    wait_until(lambda: trainer.do("leases") == 0, "the one that stands still counts as gone")
