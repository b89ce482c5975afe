"""Adapters through the store: alone, with the base that they belong to."""

import peft
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from skipper import torchstore as ts
from tests.torchstore.lora.models import adapted, redraw
from tests.torchstore.tensors.test_local_tensors import rank_of

pytestmark = pytest.mark.usefixtures("store")

BASE = ts.BaseVersion("policy", 3)


async def test_an_adapter_arrives_with_its_config_and_base() -> None:
    trainer, tokens = adapted(seed=1), torch.arange(12)
    mine = ts.lora_adapter_of(trainer, base=BASE)
    for seed in (1, 2, 3):
        redraw(trainer, seed)
        assert await ts.put_lora(mine, "policy-lora") == seed
        found = await ts.get_lora("policy-lora", base=BASE)
        assert (found.base, found.version) == (BASE, seed)
        assert dict(found.config) == dict(mine.config)
        generator = adapted(seed=9)
        peft.set_peft_model_state_dict(generator, dict(found.tensors))
        assert torch.equal(generator(tokens), trainer(tokens))
    assert await ts.versions("policy-lora") == (3,)


async def test_it_is_read_into_another_models_adapter() -> None:
    trainer, generator, tokens = adapted(seed=1), adapted(seed=2), torch.arange(12)
    mine, theirs = ts.lora_adapter_of(trainer, base=BASE), ts.lora_adapter_of(generator, base=BASE)
    for seed in (3, 4, 5):
        redraw(trainer, seed)
        await ts.put_lora(mine, "policy-lora", checksum=True)
        found = await ts.get_lora("policy-lora", theirs)
        assert found.tensors.keys() == theirs.tensors.keys()
        assert torch.equal(generator(tokens), trainer(tokens))
    record = ts.last_sync()
    assert record is not None
    assert record.plan_hit


async def test_an_adapter_of_another_base_is_refused_before_a_byte_is_read() -> None:
    await ts.put_lora(ts.lora_adapter_of(adapted(seed=1), base=BASE), "policy-lora")
    generator = adapted(seed=2)
    before = {name: tensor.clone() for name, tensor in generator.named_parameters()}
    other = ts.lora_adapter_of(generator, base=ts.BaseVersion("policy", 4))
    with pytest.raises(ts.AdapterBaseMismatchError, match=r"version 3 of 'policy'.*version 4") as caught:
        await ts.get_lora("policy-lora", other)
    assert (caught.value.base, caught.value.wanted) == (("policy", 3), ("policy", 4))
    assert all(torch.equal(before[name], tensor) for name, tensor in generator.named_parameters())


async def test_shards_of_factors_are_put_and_read() -> None:
    a, b = torch.randn(4, 6), torch.randn(10, 4)
    config = {"r": 4, "lora_alpha": 8}
    for rank in (0, 1):
        with rank_of(rank, 2):
            mesh = init_device_mesh("cpu", (2,))
            state = {
                "q.lora_A.weight": DTensor.from_local(a, mesh, [Replicate()], run_check=False),
                "q.lora_B.weight": DTensor.from_local(b[5 * rank : 5 * rank + 5], mesh, [Shard(0)], run_check=False),
            }
            await ts.put_lora(ts.lora_adapter_of(state, config=config, base=BASE), "lora")
    found = await ts.get_lora("lora")
    assert torch.equal(found.tensors["base_model.model.q.lora_A.weight"], a)
    assert torch.equal(found.tensors["base_model.model.q.lora_B.weight"], b)
    with rank_of(1, 3):
        mesh = init_device_mesh("cpu", (3,))
        shard = DTensor.from_local(
            torch.zeros(4, 4), mesh, [Shard(0)], run_check=False, shape=torch.Size((10, 4)), stride=(4, 1)
        )
        into = ts.lora_adapter_of({"q.lora_A.weight": torch.zeros(4, 6), "q.lora_B.weight": shard}, config=config)
        await ts.get_lora("lora", into)
        assert torch.equal(shard.to_local(), b[4:8])


async def test_what_does_not_fit_is_refused() -> None:
    adapter = ts.lora_adapter_of(adapted())
    with pytest.raises(ValueError, match="base"):
        await ts.put_lora(adapter, "lora")
    adapter = ts.lora_adapter_of(adapted(), base=BASE)
    with pytest.raises(ValueError, match="under another key"):
        await ts.put_lora(adapter, "policy")
    with pytest.raises(ts.KeyNotFoundError):
        await ts.get_lora("lora")
    await ts.put_lora(adapter, "lora")
    fewer = dict(adapter.tensors)
    fewer.popitem()
    with pytest.raises(ts.StateDictMismatchError):
        await ts.get_lora("lora", ts.LoRAAdapter(fewer, {}))
    other = {name: torch.zeros(3, 3) for name in adapter.tensors}
    with pytest.raises(ts.LayoutMismatchError):
        await ts.get_lora("lora", ts.LoRAAdapter(other, {}))
    await ts.put_state_dict({"w": torch.ones(3)}, "plain")
    with pytest.raises(ts.KindMismatchError, match="no LoRA adapter"):
        await ts.get_lora("plain")
