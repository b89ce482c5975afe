"""Models that are filled by a plan, against what their own `load_weights` does with the same values."""

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from skipper import torchstore as ts
from skipper.control import Actor, endpoint, this_host
from skipper.torchstore.algebra.manifest import Mode
from skipper.torchstore.clients.pinning import PinnedBlock, PinnedVersion
from tests.torchstore.plans.engine import (
    HIDDEN,
    PADDED,
    VOCABULARY,
    EngineModel,
    LookingModel,
    checkpoint,
    checkpoint_shapes,
    values_of,
)

pytestmark = pytest.mark.usefixtures("store")

KINDS: dict[str, Any] = {"plain": EngineModel, "looking": LookingModel}


def differing(model: nn.Module, expected: nn.Module) -> list[str]:
    """The parameters that are not the same bit for bit."""
    mine, theirs = values_of(model), values_of(expected)
    return [name for name in theirs if not torch.equal(mine[name], theirs[name])]


def loaded(rank: int, ranks: int, seed: int, *, quantize: bool = False, kind: str = "plain") -> EngineModel:
    """A model that has loaded the checkpoint itself."""
    model: EngineModel = KINDS[kind](rank, ranks, quantize=quantize)
    model.load_weights(checkpoint(seed).items())
    return model


class EngineRank(Actor):
    """One tensor-parallel rank of an engine, in a process of its own."""

    @endpoint
    async def sync(self, rank: int, ranks: int, folder: str) -> tuple[list[str], int]:
        """Record a plan, save it, load it, and fill a model by it. Returns what differs, and the bytes read."""
        model = EngineModel(rank, ranks)
        stored = (await ts.get_meta("policy")).tensors
        path = Path(folder) / f"{rank}.jsonl"
        ts.record_plan(model, {name: stored[name] for name in checkpoint_shapes()}).save(path)
        version = await ts.load_by_plan("policy", ts.LoadPlan.load(path), model)
        record = ts.last_sync()
        assert record is not None
        return differing(model, loaded(rank, ranks, version)), record.nbytes


async def test_each_rank_of_an_engine_reads_its_own_bytes_only(tmp_path: Path) -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    ranks = procs.spawn("ranks", EngineRank)
    await ts.put_state_dict(checkpoint(1), "policy")
    for rank in (0, 1):
        wrong, nbytes = await ranks.slice(gpus=rank).sync.call_one(rank, 2, str(tmp_path))
        assert not wrong
        model = EngineModel(rank, 2)
        padding = rank * (PADDED - VOCABULARY) * HIDDEN
        as_stored = {torch.float32: 2}  # bytes of an element in the checkpoint, where that is not the parameter's
        own = sum(p.numel() * as_stored.get(p.dtype, p.element_size()) for p in model.parameters() if p.ndim)
        assert nbytes == own - padding * 2 + model.scale.nbytes
    await procs.stop()


@pytest.mark.parametrize("mode", ["snapshot", "direct"])
@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_model_is_as_if_it_had_loaded_the_checkpoint_itself(mode: Mode, ranks: int) -> None:
    models = [EngineModel(rank, ranks) for rank in range(ranks)]
    plans = [ts.record_plan(model, checkpoint_shapes()) for model in models]
    for model in models:
        model.loaded.clear()  # recording has called its load_weights
    for seed in (1, 2, 3):
        values = checkpoint(seed)
        await ts.put_state_dict(values, "policy", mode=mode)
        for rank, (model, plan) in enumerate(zip(models, plans, strict=True)):
            assert await ts.load_by_plan("policy", plan, model) == seed
            assert not differing(model, loaded(rank, ranks, seed))
            record = ts.last_sync()
            assert record is not None
            assert (record.version, record.nbytes, record.op, record.mode) == (seed, plan.nbytes, "get", mode)
            assert model.loaded == []
        if mode == "direct":
            await ts.fence("policy")


async def test_a_version_that_several_publishers_have_put_is_read_as_one() -> None:
    model = EngineModel(1, 2)
    plan = ts.record_plan(model, checkpoint_shapes())
    values = checkpoint(4)
    for index in (0, 1):
        share = {name: tensor for number, (name, tensor) in enumerate(values.items()) if number % 2 == index}
        with pytest.raises(ts.PartiallyPublishedError) if index == 0 else nullcontext():
            await ts.put_state_dict(share, "policy", publisher=(index, 2))
            await ts.load_by_plan("policy", plan, model)
    assert not differing(model, loaded(1, 2, 4))


@pytest.mark.parametrize("kind", ["plain", "looking"])
async def test_what_is_computed_goes_through_the_models_own_load_weights(kind: str) -> None:
    model: EngineModel = KINDS[kind](0, 2, quantize=True)
    plan = ts.record_plan(model, checkpoint_shapes())
    whole = [name for group in plan.whole for name in group.names]
    await ts.put_state_dict(checkpoint(5), "policy")
    model.loaded.clear()
    await ts.load_by_plan("policy", plan, model)
    assert sorted(model.loaded) == sorted(whole)
    assert not differing(model, loaded(0, 2, 5, quantize=True, kind=kind))
    record = ts.last_sync()
    assert record is not None
    assert record.nbytes == plan.nbytes


@pytest.mark.parametrize("staging_nbytes", [1, 100, 5000, 1 << 20])
async def test_the_staging_buffer_has_the_size_that_was_asked_for(
    staging_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = EngineModel(1, 2, quantize=True)
    plan = ts.record_plan(model, checkpoint_shapes())
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    most, read = 0, PinnedVersion.read

    async def watched(self: PinnedVersion, blocks: list[PinnedBlock], timeout: float, **options: Any) -> None:
        nonlocal most
        storages = {block.into.untyped_storage() for block in blocks}
        most = max(most, sum(each.nbytes() for each in storages if each.data_ptr() not in own))
        await read(self, blocks, timeout, **options)

    monkeypatch.setattr(PinnedVersion, "read", watched)
    await ts.put_state_dict(checkpoint(1), "policy")
    await ts.load_by_plan("policy", plan, model, staging_nbytes=staging_nbytes)
    assert not differing(model, loaded(1, 2, 1, quantize=True))
    largest_whole = max(plan.checkpoint[name].nbytes for group in plan.whole for name in group.names)
    assert 0 < most <= max(staging_nbytes, largest_whole)


async def test_a_plan_is_compiled_once_for_what_goes_straight_into_the_parameters() -> None:
    model = nn.Linear(64, 64, bias=False)
    shapes = {"a": ((32, 64), torch.float32), "b": ((32, 64), torch.float32)}

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for number, (_, tensor) in enumerate(weights):
            model.weight.data[32 * number :][:32].copy_(tensor)

    plan = ts.record_plan(model, shapes, load_weights=load_weights)
    hits = []
    for seed in range(5):
        values = {name: torch.full(shape, float(seed)) for name, (shape, _) in shapes.items()}
        await ts.put_state_dict(values, "policy")
        before = model.weight._version
        await ts.load_by_plan("policy", plan, model)
        assert model.weight._version > before  # autograd is told
        assert model.weight.unique().tolist() == [seed]
        record = ts.last_sync()
        assert record is not None
        hits.append(record.plan_hit)
    assert hits[-1]


async def test_a_plan_for_another_model_is_refused_before_anything_is_read() -> None:
    plan = ts.record_plan(EngineModel(0, 2), checkpoint_shapes())
    await ts.put_state_dict(checkpoint(1), "policy")
    before = ts.last_sync()
    other = EngineModel(0, 1)
    with pytest.raises(ts.LoadPlanMismatchError, match=r"'embed_tokens' is bfloat16\[512, 64\], recorded as") as caught:
        await ts.load_by_plan("policy", plan, other)
    assert len(caught.value.differences) > 4
    assert ts.last_sync() is before
    assert all(bool((parameter == 7).all()) for parameter in other.parameters())
    with pytest.raises(ts.LoadPlanMismatchError, match="on the meta device has no memory"):
        await ts.load_by_plan("policy", plan, EngineModel(0, 2, "meta"))
    with pytest.raises(ts.LoadPlanMismatchError, match="it has no parameter"):
        await ts.load_by_plan("policy", plan, nn.Linear(2, 2))


async def test_a_plan_for_another_checkpoint_is_refused_before_anything_is_read() -> None:
    model = EngineModel(0, 2)
    plan = ts.record_plan(model, checkpoint_shapes())
    values = checkpoint(1)
    values["model.layers.0.router.weight"] = values["model.layers.0.router.weight"].float()
    del values["model.layers.1.input_layernorm.weight"]
    await ts.put_state_dict(values, "policy")
    with pytest.raises(ts.LoadPlanMismatchError, match="recorded as bfloat16") as caught:
        await ts.load_by_plan("policy", plan, model)
    assert sorted(caught.value.differences)[1] == "'model.layers.1.input_layernorm.weight' is not stored"
    assert all(bool((parameter == 7).all()) for parameter in model.parameters())


async def test_whole_tensors_need_a_load_weights() -> None:
    model = EngineModel(quantize=True)
    plan = ts.record_plan(model, checkpoint_shapes())
    with pytest.raises(TypeError, match="the plan needs load_weights"):
        await ts.load_by_plan("policy", plan, model, load_weights=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one byte"):
        await ts.load_by_plan("policy", plan, model, staging_nbytes=0)
    with pytest.raises(ts.KeyNotFoundError):
        await ts.load_by_plan("policy", plan, model)


def test_the_sync_functions_do_the_same() -> None:
    model = EngineModel()
    plan = ts.sync.record_plan(model, checkpoint_shapes())
    ts.sync.put_state_dict(checkpoint(3), "policy", checksum=True)
    assert ts.sync.load_by_plan("policy", plan, model, version=("newer_than", 0)) == 1
    assert not differing(model, loaded(0, 1, 3))
