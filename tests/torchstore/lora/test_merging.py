"""Adapters merged into their base and taken off again."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from skipper import torchstore as ts
from tests.torchstore.lora.models import adapted, block_of, redraw
from tests.torchstore.tensors.test_local_tensors import rank_of

BASE = ts.BaseVersion("policy", 3)


def adapter_of(seed: int, **options: Any) -> ts.LoRAAdapter:
    return ts.lora_adapter_of(adapted(seed, **options), base=BASE)


def bits(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}


def test_a_merged_base_gives_what_the_adapted_model_gives() -> None:
    model, plain, tokens = adapted(seed=1), block_of(), torch.arange(12)
    merger = ts.LoRAMerger(plain.state_dict(), version=BASE)
    for seed in (1, 2, 3):  # each from the base, not from the one before
        redraw(model, seed)
        merger.merge(ts.lora_adapter_of(model, base=BASE))
        assert torch.allclose(plain(tokens), model(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_base_comes_back_to_the_last_bit(dtype: torch.dtype) -> None:
    plain = block_of().to(dtype)
    state = plain.state_dict()
    before = bits(state)
    merger = ts.LoRAMerger(state)
    for seed in range(5):
        merger.merge(adapter_of(seed))
        assert bits(state) != before
    assert merger.nbytes == sum(state[name].nbytes for name in ("embed.weight", "q_proj.weight", "o_proj.weight"))
    merger.unmerge()
    assert bits(state) == before
    assert merger.nbytes == 0
    merger.unmerge()


def test_a_matrix_that_the_next_adapter_leaves_alone_comes_back() -> None:
    state = block_of().state_dict()
    before = bits(state)
    merger = ts.LoRAMerger(state)
    merger.merge(adapter_of(1))
    few = {name: tensor for name, tensor in adapter_of(2).tensors.items() if "q_proj" in name}
    merger.merge(ts.LoRAAdapter(few, {"lora_alpha": 6}))
    after = bits(state)
    assert {name for name in after if after[name] != before[name]} == {"q_proj.weight"}


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_the_base_take_their_part(dim: int) -> None:
    whole = block_of().state_dict()
    expected = {name: tensor.clone() for name, tensor in whole.items()}
    ts.LoRAMerger(expected).merge(adapter_of(1))
    for rank in range(3):
        with rank_of(rank, 3):
            mesh = init_device_mesh("cpu", (3,))
            shards = {
                name: DTensor.from_local(
                    tensor.chunk(3, dim)[rank].clone(),
                    mesh,
                    [Shard(dim)],
                    run_check=False,
                    shape=tensor.shape,
                    stride=tensor.stride(),
                )
                for name, tensor in whole.items()
                if tensor.ndim == 2
            }
            merger = ts.LoRAMerger(shards)
            merger.merge(adapter_of(1))
            for name, shard in shards.items():
                assert torch.allclose(shard.to_local(), expected[name].chunk(3, dim)[rank], rtol=1e-5, atol=1e-6)
            merger.unmerge()
            assert all(torch.equal(s.to_local(), whole[name].chunk(3, dim)[rank]) for name, s in shards.items())


def test_autograd_notices_a_merge() -> None:
    plain = block_of()
    loss = plain(torch.arange(12)).sum()
    ts.LoRAMerger(plain.state_dict()).merge(adapter_of(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_does_not_fit_is_refused_and_nothing_is_written() -> None:
    state = block_of().state_dict()
    before = bits(state)
    with pytest.raises(ts.AdapterBaseMismatchError):
        ts.LoRAMerger(state, version=ts.BaseVersion("policy", 4)).merge(adapter_of(1))
    with pytest.raises(ts.StateDictMismatchError, match="q_proj"):
        ts.LoRAMerger({name: tensor for name, tensor in state.items() if "q_proj" not in name}).merge(adapter_of(1))
    with pytest.raises(ts.LayoutMismatchError, match="q_proj"):
        ts.LoRAMerger({**state, "q_proj.weight": torch.zeros(3, 3)}).merge(adapter_of(1))
    with pytest.raises(ValueError, match="DoRA"):
        ts.LoRAMerger(state).merge(adapter_of(1, use_dora=True))
    assert bits(state) == before
