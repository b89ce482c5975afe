"""Checkpoints that were saved by DCP with copies, after one of the volumes was killed."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from skipper import torchstore as ts
from skipper.torchstore.clients.pinning import PinnedBlock
from skipper.torchstore.dcp import save_to_directory
from tests.torchstore.dcp.conftest import LIMIT_S, same_everywhere

pytestmark = pytest.mark.filterwarnings(
    "ignore:TypedStorage is deprecated:UserWarning"
)  # by DCP itself, of PyTorch 2.8


@pytest.fixture
async def volumes() -> AsyncIterator[dict[str, int]]:
    """A store with a volume for each of two ranks, and one more: their process ids."""
    await ts.initialize(3, ts.LocalRankStrategy())
    info = (await ts.client()).remote.info
    yield {name: process.pid for name, process in info.processes.items()}
    await ts.shutdown()


async def first(results: Any) -> Any:
    return next(iter((await results).values()))


@pytest.mark.parametrize("victim", ["0", "1", "2"])
async def test_a_saved_checkpoint_is_loaded_after_the_loss_of_any_one_volume(
    volumes: dict[str, int], two: Any, four: Any, tmp_path: Path, victim: str
) -> None:
    await two.train.call(0, 2)
    expected = await first(two.whole.call())
    await two.save.call("run", copies=2)
    assert (await ts.get_meta("run")).volumes == (("0", "1"), ("1", "2"))
    os.kill(volumes[victim], signal.SIGKILL)
    await four.load.call("run")
    assert same_everywhere(await four.whole.call(), expected)
    save_to_directory("run", tmp_path)
    await two.load_from_disk.call(tmp_path)
    assert same_everywhere(await two.whole.call(), expected)


async def test_a_volume_that_dies_while_its_version_is_held_costs_nothing(volumes: dict[str, int]) -> None:
    whole = torch.randn(1000, 100)
    await ts.put_state_dict({"w": whole}, "run", copies=2)
    pinned = await (await ts.client()).pin("run")
    await ts.put_state_dict({"w": whole + 1}, "run", copies=2)
    os.kill(volumes["0"], signal.SIGKILL)
    try:
        for rows in range(0, 1000, 250):
            into = torch.zeros(250, 100)
            await pinned.read([PinnedBlock("w", (rows, 0), into)], LIMIT_S)
            assert torch.equal(into, whole[rows : rows + 250])
    finally:
        pinned.release()


@pytest.mark.usefixtures("volumes")
async def test_a_save_in_the_background_goes_to_the_volume_of_its_rank(two: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        await two.save_later.call("later")
    assert (await ts.get_meta("later")).volumes == (("0",), ("1",))
