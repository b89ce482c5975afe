"""Models against the certificate of what was put: right ones, and ones with a fault that somebody has planted."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from skipper import torchstore as ts
from skipper.torchstore.algebra.layout import Box, Layout, Shard
from skipper.torchstore.algebra.manifest import Mode
from skipper.torchstore.proofs.proof import WrongTile
from tests.torchstore.oracle import random_tensor
from tests.torchstore.plans.engine import (
    FF,
    HEAD,
    HEADS,
    HIDDEN,
    PADDED,
    VOCABULARY,
    EngineModel,
    checkpoint,
    checkpoint_shapes,
)

pytestmark = pytest.mark.usefixtures("store")


async def engine(ranks: int = 2, seed: int = 1, **options: Any) -> tuple[list[EngineModel], list[ts.LoadPlan]]:
    """The ranks of an engine with the weights of a version that is certified."""
    models = [EngineModel(rank, ranks, **options) for rank in range(ranks)]
    plans = [ts.record_plan(model, checkpoint_shapes()) for model in models]
    await ts.put_state_dict(checkpoint(seed), "policy", certify=True)
    for model, plan in zip(models, plans, strict=True):
        await ts.load_by_plan("policy", plan, model)
    return models, plans


@pytest.mark.parametrize("ranks", [1, 2, 4])
async def test_ranks_that_have_loaded_by_their_plans_prove_the_version_together(ranks: int) -> None:
    models, plans = await engine(ranks)
    certificate = await ts.certificate("policy")
    proofs = [ts.prove(model, certificate, plan) for model, plan in zip(models, plans, strict=True)]
    assert all(proof.is_right for proof in proofs)
    joined = ts.join_proofs(certificate, proofs)
    # Of two names nothing is loaded.
    skipped = [name for name in checkpoint_shapes() if "rotary" in name or "head_bias" in name]
    rest = sum(certificate.tensors[name, ""].shape[0] * 4 for name in skipped)
    assert joined.covered == pytest.approx(1 - rest / certificate.nbytes)
    assert joined.is_whole
    assert (ranks == 1) == proofs[0].is_whole  # the tiles of these small matrices are cut between ranks


FAULTS: dict[str, tuple[Callable[[EngineModel, EngineModel], None], str, str]] = {
    "one flipped bit": (lambda model, _: model.w13_1.data.view(torch.int16)[2, 5, 7:8].bitwise_xor_(1),
                        "model.layers.1.experts.2.w1.weight", "w13_1"),
    "a stale shard": (lambda model, old: model.down_0.data.copy_(old.down_0.data),
                      "model.layers.0.mlp.down_proj.weight", "down_0"),
    "swapped experts": (lambda model, _: model.w2_0.data.copy_(model.w2_0.data[[1, 0, 2, 3]]),
                        "model.layers.0.experts.0.w2.weight", "w2_0"),
    "swapped halves of q and k": (lambda model, _: swap(model.qkv_1.data, 0, HEADS * HEAD, HEAD),
                                  "model.layers.1.self_attn.q_proj.weight", "qkv_1"),
    "padding that is not zero": (lambda model, _: model.embed_tokens.data[VOCABULARY + 3, 5:6].fill_(1e-30),
                                 "embed_tokens", "embed_tokens"),
    "padding that is minus zero": (lambda model, _: model.embed_tokens.data[VOCABULARY + 3, 5:6].fill_(-0.0),
                                   "embed_tokens", "embed_tokens"),
    "a norm that bfloat16 does not hold": (lambda model, _: model.norm_0.data[3:4].mul_(1 + 2**-20),
                                           "model.layers.0.input_layernorm.weight", "norm_0"),
}  # fmt: skip


def swap(rows: torch.Tensor, one: int, other: int, count: int) -> None:
    kept = rows[one : one + count].clone()
    rows[one : one + count] = rows[other : other + count]
    rows[other : other + count] = kept


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_planted_fault_is_found_and_named(fault: str) -> None:
    (model,), (plan,) = await engine(ranks=1)
    old = EngineModel()
    old.load_weights(checkpoint(9).items())
    certificate = await ts.certificate("policy")
    assert ts.prove(model, certificate, plan).is_right
    plant, name, parameter = FAULTS[fault]
    with torch.no_grad():
        plant(model, old)
    with pytest.raises(ts.ProofError, match="this is not version 1 of 'policy'") as caught:
        ts.prove(model, certificate, plan)
    error = caught.value
    assert (error.name, error.parameter) == (name, parameter)
    assert error.box is not None
    with pytest.raises(ts.ProofError):
        error.proof.tag()
    if fault == "one flipped bit":
        assert (error.proof.wrong, error.box) == ((WrongTile(name, parameter, Box((0, 0), (64, HIDDEN))),), error.box)
    if "padding" in fault:
        assert error.box == ((VOCABULARY + 3, 5), (1, 1))
    # A list of wrong tiles says which are right: all others.
    assert error.proof.covered > 0.5


async def test_a_rank_with_the_shard_of_another_version_is_found_when_its_tiles_are_joined() -> None:
    models, plans = await engine(ranks=2)
    certificate = await ts.certificate("policy")
    stale = EngineModel(1, 2)
    stale.load_weights(checkpoint(9).items())
    with torch.no_grad():  # columns of which no tile is whole on one rank
        models[1].o_0.copy_(stale.o_0)
    proofs = [ts.prove(model, certificate, plan) for model, plan in zip(models, plans, strict=True)]
    assert all(proof.is_right for proof in proofs)
    with pytest.raises(ts.ProofError, match=r"model\.layers\.0\.self_attn\.o_proj\.weight"):
        ts.join_proofs(certificate, proofs)


async def test_a_whole_old_version_is_not_the_new_one() -> None:
    (model,), (plan,) = await engine(ranks=1)
    await ts.put_state_dict(checkpoint(2), "policy", certify=True)
    with pytest.raises(ts.ProofError, match="this is not version 2"):
        ts.prove(model, await ts.certificate("policy"), plan)
    assert ts.prove(model, await ts.certificate("policy", version=1), plan).covered > 0.99


async def test_what_load_weights_computes_is_said_to_be_unproved() -> None:
    (model,), (plan,) = await engine(ranks=1, quantize=True)
    certificate = await ts.certificate("policy")
    name = "model.layers.0.self_attn.o_proj.weight"
    with pytest.raises(ts.ProofError, match=f"{name}.*cannot be proved.*own load_weights") as caught:
        ts.prove(model, certificate, plan)
    assert caught.value.box is None
    proof = ts.prove(model, certificate, plan, strict=False)
    assert {name, name.replace("0", "1")} == set(proof.unproved)
    assert proof.is_right
    assert not proof.is_whole


async def test_a_plan_for_something_else_is_refused() -> None:
    (model,), (plan,) = await engine(ranks=1)
    await ts.put_state_dict({"model.scale": torch.ones(2)}, "other", certify=True)
    other = await ts.certificate("other")
    with pytest.raises(ts.LoadPlanMismatchError, match="is not certified"):
        ts.prove(model, other, plan)
    certificate = await ts.certificate("policy")
    with pytest.raises(ts.LoadPlanMismatchError, match="no parameter"):
        ts.prove(nn.Linear(2, 2), certificate, plan)
    with pytest.raises(TypeError, match="a plan is for a module"):
        ts.prove({}, certificate, plan)
    with pytest.raises(TypeError, match="a module or a state dict"):
        ts.prove(3, certificate)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a Certificate"):
        ts.prove(model, "certificate")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["snapshot", "direct"])
async def test_a_module_proves_itself_by_its_own_names(mode: Mode) -> None:
    module, reader = nn.Linear(300, 40), nn.Linear(300, 40)
    await ts.put_state_dict(module.state_dict(), "policy", mode=mode, certify=True)
    certificate = await ts.certificate("policy")
    with pytest.raises(ts.ProofError, match=r"bias\[0:40\]|weight\[0:16, 0:256\]"):
        ts.prove(reader, certificate)
    await ts.get_state_dict("policy", reader.state_dict())
    assert ts.prove(reader, certificate).covered == 1
    assert ts.prove({"bias": reader.bias}, certificate).covered == pytest.approx(160 / certificate.nbytes)
    with pytest.raises(ts.ProofError, match="no tensor of this name"):
        ts.prove(nn.Sequential(reader), certificate)
    with pytest.raises(ts.ProofError, match="with the shape"):
        ts.prove({"bias": torch.zeros(41)}, certificate)
    with pytest.raises(ts.ProofError, match="no tensor given here is certified"):
        ts.prove({}, certificate)
    assert ts.prove({}, certificate, strict=False).covered == 0


async def test_direct_weights_that_were_changed_without_a_fence_are_found() -> None:
    weights = {"w": torch.randn(64, 512)}
    await ts.put_state_dict(weights, "policy", mode="direct", certify=True)
    certificate = await ts.certificate("policy")
    weights["w"][40, 300] += 1  # no seal tells of that
    with pytest.raises(ts.ProofError, match=r"w\[32:48, 256:512\] differ"):
        ts.prove(await ts.get_state_dict("policy"), certificate)


async def test_wider_dtypes_are_proved_as_stored_and_rounded_ones_as_stated() -> None:
    stored = {"w": torch.randn(40, 300)}
    await ts.put_state_dict(stored, "policy", certify=True)
    plain = await ts.certificate("policy")
    assert ts.prove({"w": stored["w"].double()}, plain).covered == 1
    with pytest.raises(ts.ProofError, match=r"certified as float32 only: put it with certify=\(torch\.bfloat16,\)"):
        ts.prove({"w": stored["w"].bfloat16()}, plain)
    await ts.put_state_dict(stored, "policy", certify=(torch.bfloat16, torch.float8_e4m3fn))
    stated = await ts.certificate("policy")
    assert stated.root != plain.root
    for held in (
        stored["w"],
        stored["w"].bfloat16(),
        stored["w"].bfloat16().float(),
        stored["w"].to(torch.float8_e4m3fn),
    ):
        if held is stored["w"] or held.dtype != torch.float32:
            assert ts.prove({"w": held}, stated).covered == 1
        else:  # without a plan nobody knows that it was rounded on its way
            with pytest.raises(ts.ProofError):
                ts.prove({"w": held}, stated)
    wrong = stored["w"].bfloat16()
    wrong[5, 6] += 1
    with pytest.raises(ts.ProofError, match=r"w\[0:16, 0:256\]"):
        ts.prove({"w": wrong}, stated)
    wide = stored["w"].double()
    wide[20, 280] *= 1 + 2**-40  # more than float32 holds
    with pytest.raises(ts.ProofError, match=r"w\[16:32, 256:300\]"):
        ts.prove({"w": wide}, stated)


@pytest.mark.parametrize("mode", ["snapshot", "direct"])
@pytest.mark.parametrize("quantization", [ts.BlockFP8(), ts.MXFP8(), ts.NVFP4(dtype=torch.uint8)], ids=str)
async def test_quantized_weights_are_proved_in_their_bits_and_in_the_values_that_readers_make(
    quantization: ts.BlockFP8 | ts.MXFP8 | ts.NVFP4, mode: Mode
) -> None:
    weights = {"w": torch.randn(256, 384), "norm": torch.randn(384)}
    await ts.put_state_dict(
        weights, "policy", transfer_dtype=quantization, mode=mode, certify=(torch.bfloat16, torch.float32)
    )
    certificate = await ts.certificate("policy")
    bits = await ts.get_state_dict("policy")
    assert bits["w"].dtype == quantization.dtype
    assert ts.prove(bits, certificate).covered == 1
    for dtype in (torch.bfloat16, torch.float32):
        mine = {"w": torch.zeros(256, 384, dtype=dtype)}
        await ts.get_state_dict("policy", mine, strict=False, names=lambda name: name)
        ts.prove(mine, certificate)
        mine["w"][200, 300] += 1
        with pytest.raises(ts.ProofError, match=r"w\[192:208, 256:384\]"):
            ts.prove(mine, certificate)
    half = {"w": torch.zeros(256, 384, dtype=torch.float16)}
    await ts.get_state_dict("policy", half, strict=False, names=lambda name: name)
    with pytest.raises(ts.ProofError, match=r"certified as (float8_e4m3fn|uint8) only"):
        ts.prove(half, certificate)


async def test_a_tag_goes_with_what_is_generated_and_comes_back_as_json() -> None:
    (model,), (plan,) = await engine(ranks=1)
    certificate = await ts.certificate("policy")
    tag = json.loads(json.dumps(ts.prove(model, certificate, plan).tag()))
    assert certificate.accepts(tag)
    assert certificate.accepts(tag, covered=0.99)
    assert not certificate.accepts(tag, covered=1.0)
    await ts.put_state_dict(checkpoint(2), "policy", certify=True)
    assert not (await ts.certificate("policy")).accepts(tag)
    others = [{"covered": each} for each in (True, 0, "1", float("nan"))] + [
        {"root": "00"},
        {"version": 2},
        {"key": "p"},
    ]
    for wrong in (None, "tag", {}, [], *(tag | other for other in others)):
        assert not certificate.accepts(wrong)
    (other,) = [ts.prove({"model.scale": checkpoint(1)["model.scale"]}, certificate)]
    assert other.proved != tag["proved"]
    with pytest.raises(ts.ProofError, match="nothing of version 1"):
        ts.prove({}, certificate, strict=False).tag()


async def test_proofs_of_another_version_are_not_joined() -> None:
    await ts.put_state_dict({"w": torch.ones(30)}, "a", certify=True)
    await ts.put_state_dict({"w": torch.ones(30)}, "b", certify=True)
    first, second = await ts.certificate("a"), await ts.certificate("b")
    assert first.root == second.root
    with pytest.raises(ValueError, match="does not belong to the certificate of version 1 of 'b'"):
        ts.join_proofs(second, [ts.prove({"w": torch.ones(30)}, first)])


async def test_proving_leaves_the_event_loop_alone_in_a_thread_and_in_inference_mode() -> None:
    (model,), (plan,) = await engine(ranks=1)
    certificate = await ts.certificate("policy")
    proof = await asyncio.to_thread(ts.prove, model, certificate, plan)
    with torch.inference_mode():
        assert ts.prove(model, certificate, plan) == proof
    assert model.qkv_0.grad is None


async def test_parts_of_a_tile_that_two_ranks_hold_alike_are_joined_once() -> None:
    """Ranks with other cuts than the trainers, and with some rows in common, as grouped keys and values have them."""
    whole = random_tensor(torch.bfloat16, (40, 300), 5)
    await ts.put_state_dict({"kv": whole}, "policy", certify=True)
    certificate = await ts.certificate("policy")

    class Rank(nn.Module):
        def __init__(self, start: int, stop: int) -> None:
            super().__init__()
            self.kv = nn.Parameter(torch.zeros(stop - start, 300, dtype=torch.bfloat16), requires_grad=False)
            self.place = (start, stop)

        def load_weights(self, weights: Any) -> None:
            for _, tensor in weights:
                self.kv.data.copy_(tensor[slice(*self.place)])

    proofs = []
    for place in ((0, 13), (7, 29), (29, 40)):
        rank = Rank(*place)
        plan = ts.record_plan(rank, {"kv": whole})
        await ts.load_by_plan("policy", plan, rank)
        proofs.append(ts.prove(rank, certificate, plan))
    joined = ts.join_proofs(certificate, proofs)
    assert (joined.covered, joined.is_whole) == (1, True)


def test_the_shards_of_this_file_are_cut_where_it_says() -> None:
    """The widths that make tiles of two ranks above."""
    assert PADDED % 64 == 0
    assert FF // 2 % 64
    assert Layout((HEADS * HEAD, HIDDEN), (2,), (Shard(1),)).local_shape((0,)) == (HEADS * HEAD, 32)
