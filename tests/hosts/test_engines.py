"""Engines on other machines: they join a trainer by its address, read its weights there, die, and outlive it."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from skipper.control.cluster.hosts.certs import issue, make_authority
from tests.control.conftest import wait_until
from tests.freezing import freeze
from tests.hosts.conftest import QUIET, environment, wait_for_nothing
from tests.hosts.netns import Capture, Machine, Network
from tests.torchstore.sync_process import ROWS, SyncProcess

pytestmark = pytest.mark.timeout(400)  # processes that import torch, on a busy machine

NBYTES = 2 * ROWS * 64 * 4  # of both tensors
Starts = Callable[..., SyncProcess]
SOMEWHERE = "tcp://eth0:0"


@pytest.fixture
def start(net: Network, secret_file: Path) -> Iterator[Starts]:
    """Starts a trainer or an engine on a machine, by default in a network that is trusted."""
    trust = {"SKIPPER_SECRET_FILE": str(secret_file), "SKIPPER_INSECURE": "1"}
    with ExitStack() as stack:

        def start(machine: Machine, **more: str) -> SyncProcess:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            env = {**environment(), **QUIET, "OMP_NUM_THREADS": "1", **(more or trust)}
            return stack.enter_context(SyncProcess(machine.start(SyncProcess.COMMAND, env=env, **pipes)))

        yield start
    for machine in net.machines:
        machine.clear()


def pid_of(process: SyncProcess) -> int:
    """Of the process itself, which is below that of its namespace."""
    (child,) = psutil.Process(process.process.pid).children()
    return int(child.pid)


def kill(process: SyncProcess) -> None:
    """SIGKILL for the process itself; what is around it ends with it."""
    os.kill(pid_of(process), signal.SIGKILL)


@pytest.mark.parametrize("mode", ["direct", "snapshot"])
def test_engines_on_two_machines_read_call_and_load_what_a_trainer_on_a_third_publishes(
    net: Network, start: Starts, mode: str
) -> None:
    trainer = start(net.machines[0])
    engines = [start(machine) for machine in net.machines[1:3]]
    address = trainer.do("serve", address=SOMEWHERE)
    assert address.startswith(f"tcp://{net.machines[0].address}:")
    for engine in engines:
        assert engine.do("join", address=address) is True
        assert engine.do("call", nbytes=1 << 21)[1] == 1 << 21
    for version in (1, 2):
        for engine in engines:
            engine.begin("load", after=version - 1)
        assert trainer.do("put", value=version, mode=mode) == version
        for engine in engines:
            assert engine.end() == [version, version, version]
    for engine in engines:
        assert engine.do("put_value", key="found", value=engine.do("sync")[1]) is None
        assert trainer.do("value", key="found") == 2


def test_with_certificates_the_weights_come_by_the_data_plane_only_where_that_is_opened(
    net: Network, start: Starts, tmp_path: Path
) -> None:
    make_authority(tmp_path / "ca")
    folders = []
    for machine, role in zip(net.machines[:2], ("script", "host"), strict=True):
        folders.append(str(issue(tmp_path / "ca", tmp_path / machine.name, [machine.address], role=role)))
    for is_open in (True, False):
        trainer = start(net.machines[0], SKIPPER_CERTS=folders[0])
        engine = start(net.machines[1], SKIPPER_CERTS=folders[1])
        address = trainer.do("serve", address=SOMEWHERE, data_plane=is_open)
        trainer.do("put", value=1)
        engine.do("join", address=address)
        assert engine.do("call", nbytes=1 << 21)[1] == 1 << 21
        if is_open:
            assert engine.do("sync")[:2] == [1, 1]
        else:
            with pytest.raises(RuntimeError, match="no backend can reach"):
                engine.do("sync")
        kill(trainer)
        kill(engine)


def test_an_engine_that_is_killed_in_the_middle_of_a_read_costs_the_others_nothing(net: Network, start: Starts) -> None:
    trainer, victim, other = (start(machine) for machine in net.machines[:3])
    address = trainer.do("serve", address=SOMEWHERE)
    trainer.do("put", value=1, mode="direct")
    for engine in (victim, other):
        engine.do("join", address=address)
    assert victim.do("hold") == 1
    trainer.begin("fence", timeout=60)  # far beyond what the death of a process takes to be noticed, far below a hang
    kill(victim)
    trainer.end()
    for version in (2, 3):
        assert trainer.do("put", value=version, mode="direct") == version
        assert other.do("sync", after=version - 1)[:2] == [version, version]
    assert trainer.do("leases") == 0
    wait_until(lambda: trainer.do("members") == 1, "the trainer knows who is left")


def test_an_engine_that_stands_still_or_is_cut_off_holds_a_trainer_up_for_its_heartbeat_alone(
    net: Network, start: Starts
) -> None:
    trainer, frozen, cut, other = (start(machine) for machine in net.machines[:4])
    trainer.do("configure", heartbeat_s=2.0)
    address = trainer.do("serve", address=SOMEWHERE)
    trainer.do("put", value=1, mode="direct")
    for engine in (frozen, cut, other):
        engine.do("join", address=address)
        if engine is not other:
            assert engine.do("hold") == 1
    freeze(pid_of(frozen))
    net.machines[2].unplug_silently()
    try:
        trainer.do("fence", timeout=60)
        assert trainer.do("put", value=2, mode="direct") == 2
        assert other.do("sync", after=1)[:2] == [2, 2]
        assert trainer.do("leases") == 0
    finally:
        net.machines[2].plug_silently()
    # Who was cut off joins the same job again, and has what is there now.
    with pytest.raises(RuntimeError):
        cut.do("sync", after=1)
    assert cut.do("join", address=address) is True
    assert cut.do("sync", after=1)[:2] == [2, 2]


def test_an_engine_that_comes_late_gets_the_current_version_from_another_engine(net: Network, start: Starts) -> None:
    trainer, first = start(net.machines[0]), start(net.machines[1])
    address = trainer.do("serve", address=SOMEWHERE)
    first.do("join", address=address)
    for version in (1, 2):
        trainer.do("put", value=version, mode="direct")
        assert first.do("sync", after=version - 1, serve=True)[:2] == [version, version]
    late = start(net.machines[2])
    late.do("join", address=address)
    with Capture(net.machines[0]) as capture:
        version, value, lent_nbytes = late.do("sync", serve=True)
    assert (version, value, lent_nbytes) == (2, 2, NBYTES)
    assert capture.nbytes_between(net.machines[0].address, net.machines[2].address) < NBYTES // 2


def holds_no_more(now: dict[str, int], before: dict[str, int]) -> bool:
    return all(now[what] <= before[what] for what in before)


def test_five_trainers_in_succession_feed_the_same_engines_of_other_machines(net: Network, start: Starts) -> None:
    engines = [start(machine) for machine in net.machines[1:3]]
    held: list[list[dict[str, int]]] = []
    for number in range(1, 6):
        trainer = start(net.machines[0])
        address = trainer.do("serve", address=SOMEWHERE)
        for engine in engines:
            assert engine.do("join", address=address) is True
        for step in (1, 2):
            assert trainer.do("put", value=10 * number + step, mode="direct") == step
            for engine in engines:
                assert engine.do("load", after=step - 1) == [step, 10 * number + step, 10 * number + step]
        kill(trainer)
        held.append([engine.do("resources") for engine in engines])
    for engine, second in zip(engines, held[1], strict=True):  # the first trainer's modules are imported by then
        # A thread of the last trainer's connections may still be about to end.
        wait_until(lambda: holds_no_more(engine.do("resources"), second), f"it holds what it did: {second}")  # noqa: B023
    for engine, machine in zip(engines, net.machines[1:3], strict=True):
        assert engine.do("leave") is True
        kill(engine)
        wait_for_nothing(machine)
