"""What a store says about a value, and about a read, without moving it."""

import os
from typing import Any

import pytest
import torch

from skipper import torchstore as ts
from tests.torchstore.actors import make_model

pytestmark = pytest.mark.usefixtures("store")

LARGE = (64, 96)  # through a volume


@pytest.mark.parametrize(("shape", "mode"), [((4, 8), "inline"), (LARGE, "snapshot")])
async def test_the_meta_of_a_tensor_is_its_dtype_and_shape(shape: tuple[int, ...], mode: str) -> None:
    await ts.put("t", torch.zeros(shape, dtype=torch.bfloat16))
    meta = await ts.get_meta("t")
    assert (meta.kind, meta.mode, meta.version, meta.versions) == ("tensor", mode, 1, (1,))
    assert meta.tensors[""] == ts.TensorMeta("torch.bfloat16", shape)
    assert meta.tensors[""].torch_dtype is torch.bfloat16
    assert meta.nbytes == torch.zeros(shape, dtype=torch.bfloat16).nbytes


@pytest.mark.parametrize("value", [{"lr": 1e-3}, "x" * 100_000])
async def test_the_meta_of_an_object_has_no_tensors(value: Any) -> None:
    await ts.put("o", value)
    meta = await ts.get_meta("o")
    assert (meta.kind, dict(meta.tensors), meta.nbytes) == ("object", {}, 0)


@pytest.mark.parametrize("mode", ["snapshot", "direct"])
async def test_the_meta_of_a_state_dict_lists_its_entries_and_each_has_its_own(mode: Any) -> None:
    model = make_model(share=True)
    await ts.put_state_dict({**model, "step": 3}, "m", mode=mode)
    meta = await ts.get_meta("m")
    assert (meta.kind, meta.mode, meta.objects, meta.publishers) == ("state_dict", mode, ("step",), 1)
    assert {name: tensor.shape for name, tensor in meta.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in model.items()
    }
    weight, step = await ts.get_meta("m/0.weight"), await ts.get_meta("m/step")
    assert (weight.kind, weight.tensors[""].shape) == ("tensor", (512, 512))
    assert (step.kind, step.objects) == ("object", ("step",))


async def test_there_is_no_meta_where_nothing_is() -> None:
    with pytest.raises(ts.KeyNotFoundError, match="nowhere"):
        await ts.get_meta("nowhere")
    model = make_model(share=True)
    await ts.put_state_dict(model, "m", mode="direct")
    await ts.fence("m")
    with pytest.raises(ts.KeyNotFoundError, match="at the moment"):
        await ts.get_meta("m")


async def test_an_explanation_says_what_the_read_then_does() -> None:
    model, mine = make_model(share=True), make_model(share=False)
    await ts.put_state_dict(model, "m", mode="direct")
    explained = await ts.explain("m", mine)
    total = sum(tensor.nbytes for tensor in mine.values())
    assert (explained.nbytes, explained.needed, explained.amplification) == (total, total, 1.0)
    assert (explained.known, explained.mode, explained.tensors) == (False, "direct", len(mine))
    (link,) = explained.links
    assert (link.nbytes, link.parts, link.backend) == (total, len(mine), "local")
    assert f"process {os.getpid()}" in str(explained)
    assert explained.predicted_s > 0

    await ts.get_state_dict("m", mine)
    record = ts.last_sync()
    assert record is not None
    assert (record.plan_hit, record.nbytes, record.segments) == (True, explained.nbytes, explained.segments)
    again = await ts.explain("m", mine)
    assert (again.known, again.rate_from) == (True, "last read")


async def test_explaining_moves_nothing_and_leaves_no_lease() -> None:
    model, mine = make_model(share=True), make_model(share=False)
    before = {name: tensor.clone() for name, tensor in mine.items()}
    await ts.put_state_dict(model, "m", mode="direct")
    await ts.explain("m", mine)
    assert all(torch.equal(tensor, before[name]) for name, tensor in mine.items())
    await ts.fence("m", timeout=5)


async def test_an_explanation_fails_as_the_read_would() -> None:
    await ts.put_state_dict(make_model(share=False), "m")
    with pytest.raises(ts.StateDictMismatchError, match="other"):
        await ts.explain("m", {"other": torch.zeros(3)})
    await ts.put("t", torch.zeros(LARGE))
    with pytest.raises(ts.KindMismatchError, match="use get"):
        await ts.explain("t")
