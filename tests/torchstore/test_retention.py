"""Old versions that stay readable, and going back to one, through a real controller and volume."""

from typing import Any

import pytest
import torch

from skipper import torchstore as ts
from tests.torchstore.actors import fill_model, make_model, model_values


async def put(number: int, **options: Any) -> None:
    model = make_model(share=False)
    fill_model(model, number)
    await ts.put_state_dict(model, "m", **options)


async def values(version: int) -> set[int]:
    return model_values(await ts.get_state_dict("m", make_model(share=False), version=version))


async def test_a_store_keeps_as_many_versions_as_it_was_told_to() -> None:
    await ts.initialize(keep_versions=3)
    try:
        for number in range(1, 6):
            await put(number)
        assert await ts.versions("m") == (3, 4, 5)
        assert [await values(version) for version in (3, 4, 5)] == [{3}, {4}, {5}]
        with pytest.raises(ts.VersionNotFoundError, match="ready versions: 3, 4, 5"):
            await values(2)
    finally:
        await ts.shutdown()


@pytest.mark.usefixtures("store")
async def test_a_put_says_how_many_versions_its_key_keeps_from_then_on() -> None:
    await put(1, keep=2)
    for number in (2, 3):
        await put(number)
    assert await ts.versions("m") == (2, 3)
    await put(4, keep=1)
    assert await ts.versions("m") == (4,)


@pytest.mark.usefixtures("store")
async def test_rolling_back_makes_an_older_version_the_latest() -> None:
    for number in (1, 2, 3):
        await put(number, keep=3)
    await ts.rollback("m", 1)
    assert await ts.versions("m") == (1,)
    assert model_values(await ts.get_state_dict("m")) == {1}
    with pytest.raises(ts.VersionNotFoundError):
        await ts.rollback("m", 3)
    await put(4)
    assert await ts.versions("m") == (1, 4)


@pytest.mark.usefixtures("store")
async def test_memory_of_a_thousand_versions_is_that_of_the_kept_ones() -> None:
    volume = (await ts.client()).remote.info.volumes["0"]
    model = {"w": torch.zeros(40_000)}
    for _ in range(1000):
        await ts.put_state_dict(model, "m", keep=2)
    arenas, _ = await volume.usage.call_one()
    assert arenas <= 2 + 1


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(("keep", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), ("2", TypeError)])
async def test_an_impossible_number_of_versions_is_refused(keep: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="version"):
        await put(1, keep=keep)
    with pytest.raises(error, match="version"):
        await ts.initialize(keep_versions=keep, store_name="other")


@pytest.mark.usefixtures("store")
async def test_what_was_overwritten_in_place_cannot_be_rolled_back_to() -> None:
    model = make_model(share=True)
    for _ in range(2):
        await ts.put_state_dict(model, "m", mode="direct", keep=3)
    assert await ts.versions("m") == (2,)
    with pytest.raises(ts.VersionNotFoundError):
        await ts.rollback("m", 1)
    await ts.fence("m")
    assert await ts.versions("m") == ()
