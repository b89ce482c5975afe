import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from skipper.control import Actor, DeadlineError, ProcMesh, SupervisionError, endpoint
from tests.control.actors import Answerer, Echo
from tests.control.conftest import PATIENCE_S, Failures, wait_until
from tests.freezing import freeze


class Slow(Actor):
    """Waits for a file, in ``__init__`` or in an endpoint."""

    def __init__(self, until: str = "") -> None:
        wait_for(until)

    @endpoint
    def step(self, until: str) -> None:
        wait_for(until)

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def wait_for(path: str) -> None:
    while path and not os.path.exists(path):
        time.sleep(0.01)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "open"
    yield str(path)
    path.touch()


@pytest.fixture(scope="module", autouse=True)
def _up(procs: ProcMesh) -> None:
    procs.initialized.get(PATIENCE_S)


def words(get: Callable[[], object]) -> str:
    with pytest.raises(DeadlineError) as caught:
        get()
    return str(caught.value)


def comes_to_say(get: Callable[[], object], *parts: str) -> None:
    """A busy machine may answer a question too late; the wait can be repeated."""
    wait_until(lambda: all(part in words(get) for part in parts), f"the error says {parts}")


def test_a_wait_that_is_too_short_says_who_is_waited_for_and_what_it_does(procs: ProcMesh, gate: str) -> None:
    slow = procs.slice(gpus=1).spawn("slow", Slow)
    step, pid = slow.step.call_one(gate), slow.pid.call_one()
    begin = "no result within 0.5 s: slow has not answered pid; it has been running step for "
    comes_to_say(lambda: pid.get(0.5), begin, " s; 1 message waits for it")
    assert words(lambda: pid.get(0.01)) == "no result within 0.01 s: slow has not answered pid"
    assert words(lambda: pid.get(0)) == "no result yet: slow has not answered pid"
    Path(gate).touch()
    step.get(PATIENCE_S)
    assert isinstance(pid.get(PATIENCE_S), int)


def test_a_wait_for_several_names_those_that_have_not_answered(procs: ProcMesh, gate: str) -> None:
    slow = procs.spawn("slow", Slow)
    step = slow.slice(gpus=1).step.call_one(gate)
    pids = slow.pid.call()
    begin = (
        "no result within 0.5 s: 1 of 2 have not answered pid: slow{'gpus': 1}; slow{'gpus': 1}: it has been running "
    )
    comes_to_say(lambda: pids.get(0.5), begin)
    Path(gate).touch()
    step.get(PATIENCE_S)


def test_a_wait_for_an_actor_that_is_being_constructed_says_so(procs: ProcMesh, gate: str) -> None:
    slow = procs.slice(gpus=0).spawn("slow", Slow, gate)
    pid, constructed = slow.pid.call_one(), slow.initialized
    comes_to_say(lambda: pid.get(0.5), "slow has not answered pid; it has been in __init__ for ")
    comes_to_say(lambda: constructed.get(0.5), "slow has not been constructed; it has been in __init__ for ")
    Path(gate).touch()
    slow.initialized.get(PATIENCE_S)


def test_a_wait_for_an_answer_that_somebody_owes_says_that_the_actor_is_idle(procs: ProcMesh) -> None:
    answerer = procs.slice(gpus=0).spawn("answerer", Answerer)
    kept = answerer.keep.call_one()
    comes_to_say(lambda: kept.get(0.5), "it runs nothing at the moment")
    answerer.release.call_one(3).get(PATIENCE_S)
    assert kept.get(PATIENCE_S) == 3


def test_a_wait_for_a_process_that_stands_still_says_so_and_takes_no_longer(procs: ProcMesh) -> None:
    echo = procs.slice(gpus=0).spawn("echo", Echo)
    pid = echo.pid.call_one().get(PATIENCE_S)
    freeze(pid)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the process stands still")
    try:
        answer = echo.pid.call_one()
        assert "does not say what it does: it is frozen" in words(lambda: answer.get(0.5))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert answer.get(PATIENCE_S) == pid


def test_a_stream_says_who_has_not_come(procs: ProcMesh, gate: str) -> None:
    slow = procs.spawn("slow", Slow)
    step = slow.slice(gpus=0).step.call_one(gate)
    first, second = slow.pid.stream()
    first.get(PATIENCE_S)
    assert "1 of 2 have not answered pid: slow{'gpus': 0}" in words(lambda: second.get(0.01))
    Path(gate).touch()
    step.get(PATIENCE_S)


def test_the_death_of_a_process_is_told_without_the_names_of_requests(
    own_procs: Callable[..., ProcMesh], failures: Failures, gate: str
) -> None:
    procs = own_procs({"gpus": 1})
    slow = procs.slice(gpus=0).spawn("slow", Slow, gate)
    constructed = slow.initialized
    pid = procs.slice(gpus=0).spawn("echo", Echo).pid.call_one().get(PATIENCE_S)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        SupervisionError, match=r"^slow has not been constructed: process .* is gone: .*SIGKILL"
    ) as caught:
        constructed.get(PATIENCE_S)
    assert caught.value.failure is not None
    with pytest.raises(SupervisionError, match=r"does not answer: process .* is gone"):
        procs.initialized.get(PATIENCE_S)
    failures.wait()


def test_a_call_of_an_actor_that_has_been_stopped_names_it(procs: ProcMesh) -> None:
    echo = procs.slice(gpus=0).spawn("echo", Echo)
    echo.stop().get(PATIENCE_S)
    with pytest.raises(SupervisionError, match=r"^cannot answer echo: actor echo has been stopped$"):
        echo.echo.call_one(1).get(PATIENCE_S)
