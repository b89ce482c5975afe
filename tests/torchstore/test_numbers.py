"""Numbers that nobody means, handed to everything of the store that takes one."""

from typing import Any

import pytest
import torch

from skipper import torchstore as ts
from skipper.torchstore.errors import StoreError
from tests.numbers import STRANGE


def tensors() -> dict[str, torch.Tensor]:
    return {"weight": torch.ones(4, 4)}


async def read_named(**named: Any) -> object:
    return await ts.get_state_dict("key", {"weight": torch.zeros(4, 4)}, names=lambda name: ts.Part("weight", **named))


async def load_nothing(**named: Any) -> object:
    plan = ts.LoadPlan({}, {}, (), (), (), ())
    return await ts.load_by_plan("key", plan, torch.nn.Linear(1, 1), **named)


CALLS: dict[str, Any] = {
    "put, timeout": lambda value: ts.put("value", 1, timeout=value),
    "get, timeout": lambda value: ts.get("tensor", timeout=value),
    "keys, timeout": lambda value: ts.keys("", timeout=value),
    "exists, timeout": lambda value: ts.exists("tensor", timeout=value),
    "delete, timeout": lambda value: ts.delete_batch(["value"], timeout=value),
    "get_meta, timeout": lambda value: ts.get_meta("tensor", timeout=value),
    "versions, timeout": lambda value: ts.versions("key", timeout=value),
    "explain, timeout": lambda value: ts.explain("key", timeout=value),
    "load_by_plan, timeout": lambda value: load_nothing(timeout=value),
    "load_by_plan, version": lambda value: load_nothing(version=value, timeout=0.5),
    "load_by_plan, staging_nbytes": lambda value: load_nothing(staging_nbytes=value),
    "fence, timeout": lambda value: ts.fence("key", timeout=value),
    "wait_for_readers, timeout": lambda value: ts.wait_for_readers("key", timeout=value),
    "get_state_dict, timeout": lambda value: ts.get_state_dict("key", timeout=value),
    "get_state_dict, version": lambda value: ts.get_state_dict("key", version=value, timeout=0.5),
    "rollback": lambda value: ts.rollback("key", value),
    "put_state_dict, version": lambda value: ts.put_state_dict(tensors(), "of versions", version=value),
    "put_state_dict, keep": lambda value: ts.put_state_dict(tensors(), "of keep", keep=value),
    "put_state_dict, publisher": lambda value: ts.put_state_dict(
        tensors(), "of publishers", publisher=(value, 2), timeout=0.5
    ),
    "put_state_dict, publishers": lambda value: ts.put_state_dict(
        tensors(), "of publishers", publisher=(0, value), timeout=0.5
    ),
    "BlockFP8": lambda value: ts.put_state_dict(tensors(), "of blocks", transfer_dtype=ts.BlockFP8((value, 128))),
    "Part, start": lambda value: read_named(start=value),
    "Part, stop": lambda value: read_named(stop=value),
    "Part, dim": lambda value: read_named(dim=value),
    "Part, chunk": lambda value: read_named(chunk=(value, 2)),
    "Part, chunks": lambda value: read_named(chunk=(0, value)),
    "initialize, volumes": lambda value: ts.initialize(value),
    "initialize, keep_versions": lambda value: ts.initialize(keep_versions=value),
    "initialize, volume_nbytes": lambda value: ts.initialize(volume_nbytes=value),
}


@pytest.mark.parametrize("name", CALLS)
async def test_strange_numbers_are_refused_in_words(store: None, name: str) -> None:
    await ts.put("tensor", torch.ones(4))
    await ts.put_state_dict(tensors(), "key")
    for value in STRANGE:
        try:
            await CALLS[name](value)
        except (ValueError, TypeError, TimeoutError, StoreError) as error:
            assert str(error)  # noqa: PT017  (any of them will do)


@pytest.mark.parametrize("place", range(5))
def test_slices_of_strange_numbers_are_refused_in_words(place: int) -> None:
    for value in STRANGE:
        numbers: list[Any] = [(0,), (0,), (4,), (4,), (1,)]
        numbers[place] = (value,)
        try:
            ts.TensorSlice(*numbers)
        except (ValueError, TypeError) as error:
            assert str(error)  # noqa: PT017
