"""How the examples learn why they end: the news of a death before, during and after the work that it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from examples.faults import FirstFault
from skipper import control
from skipper.control import FailureKind, MeshFailure, SupervisionError

DEATH = MeshFailure("trainers", "trainers{'gpus': 1}", None, FailureKind.PROCESS, "killed by signal 9 (SIGKILL)")


@pytest.fixture
def faults() -> Iterator[FirstFault]:
    hook = control.unhandled_fault_hook
    yield FirstFault()
    control.unhandled_fault_hook = hook


async def broken() -> None:
    raise control.ActorError("trainers{'gpus': 0}", "train", "RuntimeError: a peer left the collective", "")


def test_news_that_comes_after_the_work_has_failed_explains_it(faults: FirstFault) -> None:
    with pytest.raises(control.ActorError) as raised:
        asyncio.run(faults.guard(broken()))
    control.unhandled_fault_hook(DEATH)
    assert "killed by signal 9" in faults.explain(raised.value)


@pytest.mark.parametrize("early", [True, False], ids=["before the work", "during the work"])
def test_news_ends_work_that_waits_for_somebody_else(faults: FirstFault, early: bool) -> None:
    async def waits_for_ever() -> None:
        if not early:
            await asyncio.to_thread(control.unhandled_fault_hook, DEATH)
        await asyncio.Event().wait()

    if early:
        control.unhandled_fault_hook(DEATH)
    with pytest.raises(SupervisionError, match="killed by signal 9"):
        asyncio.run(asyncio.wait_for(faults.guard(waits_for_ever()), 10.0))


def test_only_the_first_failure_is_told(faults: FirstFault) -> None:
    control.unhandled_fault_hook(DEATH)
    control.unhandled_fault_hook(MeshFailure("generators", "generators", None, FailureKind.PROCESS, "followed"))
    assert "killed by signal 9" in faults.explain(TimeoutError())
