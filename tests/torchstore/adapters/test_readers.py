"""The trainer's wait for workers that read in the background."""

from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any

import pytest

from skipper import torchstore as ts
from skipper.torchstore.adapters.board import tell
from tests.torchstore import stand_ins

stand_ins.install()
readers: Any = import_module("skipper.torchstore.adapters.vllm.readers")


@pytest.fixture(autouse=True)
async def job(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(readers, "_ALIVE_S", 0.05)
    await ts.initialize()
    yield
    await ts.shutdown()


def nobody_is_asked(info: dict[str, Any]) -> None:
    raise AssertionError(f"asked {info}")


def test_it_ends_when_all_have_read() -> None:
    watch = readers.ReadersWatch("all", timeout=20)
    for name in "ab":
        tell("begun", "all", name)
        tell("ended", "all", name, "")
    watch.wait(nobody_is_asked)
    watch.close()
    tell("ended", "all", "a", "too late")  # is passed over
    assert tell("readers", "all") == {}


def test_who_does_not_answer_is_not_waited_for_and_others_are() -> None:
    watch = readers.ReadersWatch("some", timeout=20)
    asked: list[int] = []

    def ask(info: dict[str, Any]) -> None:
        asked.append(info["question"])
        tell("answer", "some", "slow", info["question"])
        if len(asked) == 3:
            tell("ended", "some", "slow", "")

    for name in ("slow", "dead"):
        tell("begun", "some", name)
    watch.wait(ask)
    assert asked == [1, 2, 3]


def test_what_went_wrong_is_raised() -> None:
    for name, failure in (("a", ""), ("b", "VolumeLostError: gone"), ("c", "VolumeLostError: gone")):
        tell("begun", "bad", name)
        tell("ended", "bad", name, failure)
    with pytest.raises(RuntimeError, match=r"could not read the weights: VolumeLostError: gone$"):
        readers.ReadersWatch("bad", timeout=20).wait(nobody_is_asked)


def test_the_wait_has_a_bound() -> None:
    tell("begun", "long", "a")
    with pytest.raises(TimeoutError, match=r"1 workers have not read .* 0\.3 s"):
        readers.ReadersWatch("long", timeout=0.3).wait(lambda info: tell("answer", "long", "a", info["question"]))


def test_the_board_forgets_updates_of_trainers_that_died() -> None:
    for number in range(12):
        tell("begun", str(number), "a")
    assert [len(tell("readers", str(number))) for number in (0, 3, 4, 11)] == [0, 0, 1, 1]
