"""Values: put, get, slices, batches, listing and deleting, through a real controller and volume."""

import asyncio
from typing import Any

import pytest
import torch

from skipper import torchstore as ts
from skipper.torchstore.tensors.values import INLINE_BYTES
from tests.torchstore.oracle import bits, random_tensor

pytestmark = pytest.mark.usefixtures("store")

SMALL, LARGE = (4, 8), (64, 96)  # inline, and through a volume


class Opaque:
    """An object that only pickle knows how to move."""

    def __init__(self, content: object) -> None:
        self.content = content


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), SMALL, LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e5m2])
async def test_a_tensor_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(dtype, shape, 1)
    await ts.put("t", tensor)
    fetched = await ts.get("t")
    assert (fetched.dtype, fetched.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(bits(fetched), bits(tensor))


@pytest.mark.parametrize("shape", [SMALL, LARGE])
async def test_a_get_in_place_fills_and_returns_the_given_tensor(shape: tuple[int, ...]) -> None:
    tensor = random_tensor(torch.float32, shape, 2)
    await ts.put("t", tensor)
    frame = torch.zeros(shape[0] + 2, shape[1] + 2)
    for into in (torch.zeros(shape), frame[1:-1, 1:-1], torch.zeros(shape[1], shape[0]).t()):
        assert await ts.get("t", into) is into
        assert torch.equal(bits(into), bits(tensor))
    frame[1:-1, 1:-1] = 0
    assert not bool(frame.any())


@pytest.mark.parametrize("shape", [SMALL, LARGE])
async def test_strided_and_gradient_carrying_tensors_can_be_put(shape: tuple[int, ...]) -> None:
    base = torch.randn(shape[1], shape[0] * 2, requires_grad=True)
    await ts.put("t", base[:, ::2].t())
    assert torch.equal(await ts.get("t"), base[:, ::2].t())


@pytest.mark.parametrize("shape", [SMALL, LARGE])
async def test_a_slice_takes_only_its_part(shape: tuple[int, ...]) -> None:
    tensor = random_tensor(torch.int32, shape, 3)
    await ts.put("t", tensor)
    spec = ts.TensorSlice(offsets=(1, 2), coordinates=(), global_shape=shape, local_shape=(2, 3), mesh_shape=())
    assert torch.equal(await ts.get("t", tensor_slice_spec=spec), tensor[1:3, 2:5])
    into = torch.zeros(2, 3, dtype=torch.int32)
    assert await ts.get("t", into, spec) is into
    assert torch.equal(into, tensor[1:3, 2:5])
    with pytest.raises(ts.LayoutMismatchError, match="the given tensor"):
        await ts.get("t", torch.zeros(3, 3, dtype=torch.int32), spec)
    wrong = ts.TensorSlice(offsets=(0, 0), coordinates=(), global_shape=(99, 99), local_shape=(2, 3), mesh_shape=())
    with pytest.raises(ts.LayoutMismatchError, match="99"):
        await ts.get("t", tensor_slice_spec=wrong)


@pytest.mark.parametrize("size", [10, 10 * INLINE_BYTES])
async def test_objects_of_any_size_come_back_equal_and_independent(size: int) -> None:
    value = {"text": "x" * size, "nested": [1, (2, 3)], "opaque": Opaque([1, 2])}
    await ts.put("o", value)
    value["text"] = "changed"
    fetched = await ts.get("o")
    assert fetched["text"] == "x" * size
    assert fetched["nested"] == [1, (2, 3)]
    assert fetched["opaque"].content == [1, 2]


@pytest.mark.parametrize("shape", [SMALL, LARGE])
async def test_a_put_copies_and_an_overwrite_replaces_the_whole_value(shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape)
    await ts.put("t", tensor)
    tensor.zero_()
    assert bool((await ts.get("t") == 1).all())
    for other in (torch.full(shape, 2.0), torch.ones(7, 7, 90, dtype=torch.int16), "text", torch.ones(shape)):
        await ts.put("t", other)
        fetched = await ts.get("t")
        assert fetched == other if isinstance(other, str) else torch.equal(fetched, other)
    assert await ts.versions("t") == (5,)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
async def test_a_tensor_of_another_shape_or_dtype_is_refused_and_left_alone(shape: tuple[int, ...]) -> None:
    await ts.put("t", torch.ones(shape))
    wrong_dtype, wrong_shape = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape[1], shape[0])
    with pytest.raises(ts.DTypeMismatchError, match=r"'t'.*float32.*int32"):
        await ts.get("t", wrong_dtype)
    with pytest.raises(ts.LayoutMismatchError, match="'t'"):
        await ts.get("t", wrong_shape)
    assert not bool(wrong_dtype.any())
    assert not bool(wrong_shape.any())


async def test_an_object_where_a_tensor_is_expected_is_refused() -> None:
    await ts.put_batch({"o": "text", "large": "text" * INLINE_BYTES})
    for key in ("o", "large"):
        with pytest.raises(ts.KindMismatchError, match=key):
            await ts.get(key, torch.zeros(2))
    with pytest.raises(ts.KindMismatchError, match="inplace_tensor"):
        await ts.get("o", [1, 2])  # type: ignore[arg-type]
    with pytest.raises(ts.KindMismatchError, match="use get"):
        await ts.get_state_dict("o")


async def test_a_missing_key_is_a_key_error_that_names_it() -> None:
    for call in (ts.get("nothing"), ts.delete("nothing"), ts.get_state_dict("nothing")):
        with pytest.raises(KeyError, match="nothing") as caught:
            await call
        assert isinstance(caught.value, ts.KeyNotFoundError)
    assert not await ts.exists("nothing")
    await ts.delete_batch(["nothing"])


async def test_batches_take_and_give_many_values_at_once() -> None:
    values: dict[str, Any] = {f"k{n}": random_tensor(torch.float32, (n, 50), n) for n in range(0, 100, 9)}
    values["object"] = {"a": 1}
    await ts.put_batch(values)
    fetched = await ts.get_batch(list(values))
    assert list(fetched) == list(values)
    assert fetched.pop("object") == {"a": 1}
    assert all(torch.equal(bits(fetched[key]), bits(values[key])) for key in fetched)
    into = torch.zeros(99, 50)
    part = ts.TensorSlice(offsets=(1, 0), coordinates=(), global_shape=(9, 50), local_shape=(2, 5), mesh_shape=())
    some = await ts.get_batch({"k99": into, "k9": part, "k18": None})
    assert some["k99"] is into
    assert torch.equal(bits(into), bits(values["k99"]))
    assert torch.equal(bits(some["k9"]), bits(values["k9"][1:3, :5]))
    assert await ts.get_batch([]) == {}
    await ts.put_batch({})


async def test_a_batch_of_more_keys_than_a_client_remembers_works_again_and_again() -> None:
    values = {f"k{n}": torch.full((40, 60), n) for n in range(300)}
    await ts.put_batch(values)
    for _ in range(3):
        fetched = await ts.get_batch(list(values))
        assert all(torch.equal(fetched[key], values[key]) for key in values)


async def test_a_batch_with_a_missing_key_gives_nothing_at_all() -> None:
    await ts.put("there", torch.ones(LARGE))
    into = torch.zeros(LARGE)
    with pytest.raises(ts.KeyNotFoundError, match="absent"):
        await ts.get_batch({"there": into, "absent": None})
    assert not bool(into.any())


async def test_keys_lists_by_prefix_and_opens_state_dicts() -> None:
    await ts.put_batch({"v0.x": 1, "v0.y": 2, "v1.x": 3})
    await ts.put_state_dict({"layer": {"weight": torch.ones(3)}, "step": 1}, "policy")
    assert await ts.keys() == ["policy/layer.weight", "policy/step", "v0.x", "v0.y", "v1.x"]
    assert await ts.keys("v0") == ["v0.x", "v0.y"]
    assert await ts.keys("policy") == await ts.keys("policy/") == ["policy/layer.weight", "policy/step"]
    assert await ts.keys("policy/layer") == ["policy/layer.weight"]
    assert await ts.keys("policy/la") == []
    assert await ts.keys("nothing") == []


async def test_deleted_keys_are_gone_and_can_be_put_again() -> None:
    await ts.put_batch({"a": torch.ones(LARGE), "b": torch.ones(LARGE)})
    await ts.delete("a")
    assert await ts.keys() == ["b"]
    with pytest.raises(ts.KeyNotFoundError):
        await ts.get("a")
    await ts.delete_batch(["a", "b"])
    await ts.put("a", torch.zeros(LARGE))
    assert not bool((await ts.get("a")).any())


async def test_many_overwrites_use_two_arenas_and_deleting_frees_them() -> None:
    client = await ts.client()
    (volume,) = client.remote.info.volumes.values()
    tensor = torch.ones(LARGE)
    for _ in range(20):
        await ts.put("t", tensor)
    assert await volume.usage.call_one() == (2, 2 * tensor.nbytes)
    await ts.put("t", torch.ones(2 * LARGE[0], LARGE[1]))
    await ts.put("t", torch.ones(2 * LARGE[0], LARGE[1]))
    await ts.put("t", torch.ones(2 * LARGE[0], LARGE[1]))
    assert (await volume.usage.call_one())[1] == 4 * tensor.nbytes
    await ts.delete("t")
    await ts.exists("t")  # the controller has told the volume before it answers this
    assert await volume.usage.call_one() == (0, 0)


async def test_every_process_of_the_job_sees_the_same_store(peers: Any) -> None:
    one, other = peers.slice(gpus=0), peers.slice(gpus=1)
    for shape in (SMALL, LARGE):
        tensor = random_tensor(torch.float32, shape, 5)
        await one.put.call_one("shared", tensor)
        assert torch.equal(bits(await other.get.call_one("shared")), bits(tensor))
        assert torch.equal(bits(await ts.get("shared")), bits(tensor))
    with pytest.raises(Exception, match="no value under the key"):
        await other.get.call_one("absent")


async def test_stores_side_by_side_know_nothing_of_each_other(peers: Any) -> None:
    await ts.initialize(store_name="second")
    try:
        await ts.put("k", 1)
        await ts.put("k", 2, "second")
        assert (await ts.get("k"), await ts.get("k", store_name="second")) == (1, 2)
        assert await peers.slice(gpus=0).get.call_one("k", "second") == 2
    finally:
        await ts.shutdown("second")
    assert await ts.get("k") == 1
    with pytest.raises(ts.StoreNotInitializedError, match="second"):
        await ts.get("k", store_name="second")


async def test_concurrent_puts_and_gets_of_one_key_never_mix() -> None:
    async def write(number: int) -> None:
        await ts.put("t", torch.full(LARGE, number))

    async def read() -> None:
        assert len((await ts.get("t")).unique()) == 1

    await write(0)
    await asyncio.gather(*(action for number in range(1, 20) for action in (write(number), read(), read())))


async def test_small_values_cost_one_message_each_way() -> None:
    for value in (torch.ones(16), {"a": 1}):
        await ts.put("small", value)
        record = ts.last_sync()
        assert record is not None
        assert (record.op, record.mode, record.control_calls) == ("put", "inline", 1)
        await ts.get("small")
        record = ts.last_sync()
        assert record is not None
        assert (record.op, record.mode, record.control_calls) == ("get", "inline", 1)


async def test_a_running_store_cannot_be_initialized_again() -> None:
    with pytest.raises(ts.StrategyError, match="already"):
        await ts.initialize()


async def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(TypeError, match="key"):
        await ts.put(3, torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="TensorSlice"):
        await ts.get("k", tensor_slice_spec=(1, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        await ts.initialize(0, store_name="none")
    with pytest.raises(ts.StrategyError, match="LocalRankStrategy"):
        await ts.initialize(2, store_name="none")


async def test_synchronous_code_uses_the_store_through_asyncio_run() -> None:
    def work() -> Any:
        asyncio.run(ts.put("k", torch.ones(LARGE)))
        return asyncio.run(ts.get("k"))

    assert torch.equal(await asyncio.to_thread(work), torch.ones(LARGE))
