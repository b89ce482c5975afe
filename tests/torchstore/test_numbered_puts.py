"""Puts that say which version they make: single values, batches, and shares after a put that failed."""

import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from skipper import torchstore as ts
from skipper.torchstore import sync as blocking
from tests.freezing import freeze

LARGE = 3 << 20  # floats: more than a batch shares

VALUES: dict[str, Callable[[float], Any]] = {
    "in a message": lambda value: torch.full((8,), value),
    "in an arena": lambda value: torch.full((64, 64), value),
    "large": lambda value: torch.full((LARGE,), value),
    "an object": lambda value: {"value": value},
    "a large object": lambda value: [value] * 20_000,
}


@pytest.fixture(autouse=True)
def _store(store: None) -> None:
    """All tests here use the default store."""


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize("kind", VALUES)
async def test_a_put_says_its_version_and_the_next_one_goes_on_from_there(kind: str) -> None:
    make = VALUES[kind]
    await ts.put("k", make(1), version=7)
    assert await ts.versions("k") == (7,)
    assert same(await ts.get("k"), make(1))
    for taken in (7, 3):
        with pytest.raises(ts.VersionExistsError, match=f"version {taken} of 'k' cannot be put.* newest one is 7"):
            await ts.put("k", make(2), version=taken)
    assert same(await ts.get("k"), make(1))
    await ts.put("k", make(3))
    assert await ts.versions("k") == (8,)
    assert same(await ts.get("k"), make(3))


async def test_all_values_of_a_batch_get_the_version_or_none_does() -> None:
    await ts.put("large", VALUES["large"](0), version=5)
    batch = {kind: make(1) for kind, make in VALUES.items()}
    with pytest.raises(ts.VersionExistsError, match="'large'"):
        await ts.put_batch(batch, version=5)
    assert await ts.keys() == ["large"]
    assert same(await ts.get("large"), VALUES["large"](0))
    for version in (6, 9):
        batch = {kind: make(version) for kind, make in VALUES.items()}
        await ts.put_batch(batch, version=version)
        assert {await ts.versions(kind) for kind in VALUES} == {(version,)}
        got = await ts.get_batch(list(batch))
        assert all(same(got[kind], batch[kind]) for kind in batch)


def test_the_functions_that_wait_take_it_as_well() -> None:
    blocking.put("k", torch.ones(3), version=4)
    blocking.put_batch({"a": 1, "b": torch.ones(64, 64)}, version=4)
    assert [blocking.versions(key) for key in ("k", "a", "b")] == [(4,)] * 3


@pytest.mark.parametrize("wrong", [True, 1.5, "7"])
async def test_a_version_is_a_number(wrong: Any) -> None:
    for put in (ts.put("k", 1, version=wrong), ts.put_batch({"k": 1}, version=wrong)):
        with pytest.raises(TypeError, match="a version is a number"):
            await put
    with pytest.raises(ValueError, match="-1"):
        await ts.put("k", 1, version=-1)
    assert await ts.keys() == []


@pytest.fixture
async def volume() -> AsyncIterator[int]:
    """A second store, whose volume is a process of its own: its id."""
    await ts.initialize(1, ts.LocalRankStrategy(), "second")
    (process,) = (await ts.client("second")).remote.info.processes.values()
    yield process.pid
    await ts.shutdown("second")


async def test_a_share_whose_put_failed_goes_on_by_its_version(volume: int) -> None:
    share = torch.ones(64, 64)
    freeze(volume)
    try:
        with pytest.raises(ts.StoreTimeoutError):
            await ts.put("k", share, "second", publisher=(0, 2), timeout=0.3)
    finally:
        os.kill(volume, signal.SIGCONT)
    with pytest.raises(ts.OutOfStepError, match="say which version"):
        await ts.put("k", share, "second", publisher=(0, 2))
    await ts.put("k", share, "second", publisher=(0, 2), version=3)
    with pytest.raises(ts.PartiallyPublishedError, match=r"version 3 of 'k'.*rank 1 of 2"):
        await ts.get("k", store_name="second")
    await ts.put("k", share, "second", publisher=(0, 2))  # the step after it
    with pytest.raises(ts.PartiallyPublishedError, match=r"version 4 of 'k'.*rank 1 of 2"):
        await ts.get("k", store_name="second")
