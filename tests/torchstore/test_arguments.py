"""Arguments that cannot be meant: typed errors that name them, before anything is sent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from skipper import torchstore as ts

NOTHING = ts.LoadPlan({}, {}, (), (), (), ())

OF_ONE_KEY: dict[str, Callable[..., Any]] = {
    "put": lambda key, **more: ts.put(key, 1, **more),
    "put_batch": lambda key, **more: ts.put_batch({key: 1}, **more),
    "get": ts.get,
    "get_batch": lambda key, **more: ts.get_batch([key], **more),
    "delete": ts.delete,
    "delete_batch": lambda key, **more: ts.delete_batch([key], **more),
    "exists": ts.exists,
    "get_meta": ts.get_meta,
    "certificate": ts.certificate,
    "put_state_dict": lambda key, **more: ts.put_state_dict({"w": torch.ones(2)}, key, **more),
    "get_state_dict": ts.get_state_dict,
    "explain": ts.explain,
    "load_by_plan": lambda key, **more: ts.load_by_plan(key, NOTHING, torch.nn.Linear(1, 1), **more),
    "versions": ts.versions,
    "rollback": lambda key, **more: ts.rollback(key, 1, **more),
    "fence": ts.fence,
    "wait_for_readers": ts.wait_for_readers,
}


@pytest.fixture(autouse=True)
def _store(store: None) -> None:
    """All tests here use the default store."""


@pytest.mark.parametrize("name", OF_ONE_KEY)
async def test_what_is_no_key_is_refused(name: str) -> None:
    call = OF_ONE_KEY[name]
    for wrong in (b"key", 3, None):
        with pytest.raises(TypeError, match="a key is a string"):
            await call(wrong)
    with pytest.raises(ValueError, match="NUL"):
        await call("a\0b")
    assert await ts.keys() == []


@pytest.mark.parametrize("name", OF_ONE_KEY)
async def test_a_timeout_that_leaves_no_time_is_refused(name: str) -> None:
    for wrong in (0, -1, -0.5):
        with pytest.raises(ValueError, match="timeout"):
            await OF_ONE_KEY[name]("key", timeout=wrong)
    with pytest.raises(TypeError, match="timeout"):
        await OF_ONE_KEY[name]("key", timeout="1")
    assert await ts.keys() == []


@pytest.mark.parametrize("wrong", ["abc", b"abc", 3, None])
async def test_one_string_is_no_list_of_keys(wrong: Any) -> None:
    await ts.put_batch({"a": 1, "b": 2, "c": 3})
    with pytest.raises(TypeError, match="several keys"):
        await ts.get_batch(wrong)
    with pytest.raises(TypeError, match="several keys"):
        await ts.delete_batch(wrong)
    assert await ts.keys() == ["a", "b", "c"]


async def test_a_batch_to_put_is_a_dict() -> None:
    wrong: Any = [("a", 1)]
    with pytest.raises(TypeError, match="entries is a dict"):
        await ts.put_batch(wrong)


async def test_a_prefix_is_a_string() -> None:
    wrong: Any = b"v0"
    with pytest.raises(TypeError, match="a prefix is a string"):
        await ts.keys(wrong)


async def test_versions_below_0_are_refused() -> None:
    await ts.put_state_dict({"w": torch.ones(2)}, "m")
    for call in (
        ts.get_state_dict("m", version=-1),
        ts.put_state_dict({"w": torch.ones(2)}, "m", version=-1),
        ts.rollback("m", -1),
        ts.explain("m", version=-1),
    ):
        with pytest.raises(ValueError, match="-1"):
            await call
    assert await ts.versions("m") == (1,)


async def test_a_state_dict_is_a_mapping() -> None:
    wrong: Any = [torch.ones(2)]
    with pytest.raises(TypeError, match="'m': a state dict is a mapping, not list"):
        await ts.put_state_dict(wrong, "m")


async def test_the_empty_key_is_a_key() -> None:
    await ts.put("", torch.ones(2))
    assert (await ts.get("")).tolist() == [1, 1]


async def test_arguments_one_place_off_are_refused() -> None:
    """A name or a dtype where a flag belongs is true, and would have been taken for one."""
    wrong: Any
    for wrong in (torch.bfloat16, "direct", 1, None):
        with pytest.raises(TypeError, match="direct_rdma is True or False, not"):
            await ts.put_state_dict({"w": torch.ones(2)}, "m", "default", wrong)
        with pytest.raises(TypeError, match="direct_rdma is True or False, not"):
            await ts.get_state_dict("m", None, True, "default", wrong)
    for wrong in ("default", 1, None):
        with pytest.raises(TypeError, match="strict is True or False, not"):
            await ts.get_state_dict("m", {"w": torch.ones(2)}, wrong)
        with pytest.raises(TypeError, match="strict is True or False, not"):
            await ts.explain("m", {"w": torch.ones(2)}, wrong)
    assert await ts.keys() == []


@pytest.mark.parametrize("name", ["delta", "verify_replicas", "checksum"])
async def test_flags_of_a_put_are_true_or_false(name: str) -> None:
    flag: Any = {name: "yes"}
    with pytest.raises(TypeError, match=f"{name} is True or False, not 'yes'"):
        await ts.put_state_dict({"w": torch.ones(2)}, "m", **flag)
    assert await ts.keys() == []


async def test_two_modes_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match="direct_rdma=True means mode='direct', but mode='snapshot' was given"):
        await ts.put_state_dict({"w": torch.ones(2)}, "m", direct_rdma=True, mode="snapshot")
