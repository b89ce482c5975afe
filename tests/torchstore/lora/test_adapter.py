"""Adapters as PEFT names them: selected from models, saved as its checkpoints, and what they add."""

import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.utils import load_peft_weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from skipper import torchstore as ts
from tests.torchstore.lora.models import adapted
from tests.torchstore.tensors.test_local_tensors import rank_of


def test_the_names_and_the_memory_are_those_of_peft() -> None:
    model = adapted()
    found = ts.lora_adapter_of(model, base=ts.BaseVersion("policy", 3))
    expected = peft.get_peft_model_state_dict(model)
    assert found.tensors.keys() == expected.keys()
    assert all(found.tensors[name].data_ptr() == expected[name].data_ptr() for name in expected)
    assert found.base == ts.BaseVersion("policy", 3)
    assert (found.config["r"], found.config["lora_alpha"], found.config["peft_type"]) == (4, 6, "LORA")
    assert json.loads(json.dumps(dict(found.config)))["target_modules"] == ["embed", "o_proj", "q_proj"]


def test_wrappers_do_not_change_the_names() -> None:
    model = adapted()
    expected = ts.lora_adapter_of(model).tensors.keys()
    wrapped = torch.nn.ModuleDict({"_orig_mod": torch.nn.ModuleDict({"module": model})})
    config = model.peft_config["default"].to_dict()
    assert ts.lora_adapter_of(wrapped, config=config).tensors.keys() == expected


def test_one_of_several_adapters_is_selected() -> None:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert len(ts.lora_adapter_of(model).tensors) == 6
    other = ts.lora_adapter_of(model, adapter="other")
    assert set(other.tensors) == {f"base_model.model.q_proj.lora_{side}.weight" for side in "AB"}
    assert other.config["r"] == 2


def test_modules_of_ones_own_are_named_alike() -> None:
    state = {
        "layers.0.q.lora_A": torch.ones(2, 3),
        "layers.0.q.lora_B.weight": torch.ones(4, 2),
        "layers.0.q.weight": 1,
    }
    found = ts.lora_adapter_of(state, config={"r": 2, "lora_alpha": 4})  # type: ignore[arg-type]
    assert set(found.tensors) == {f"base_model.model.layers.0.q.lora_{side}.weight" for side in "AB"}


def test_dtensors_stay_dtensors() -> None:
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        state = {f"q.lora_{side}.weight": distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]) for side in "AB"}
        found = ts.lora_adapter_of(state, config={"r": 4, "lora_alpha": 4})
        assert all(isinstance(tensor, DTensor) for tensor in found.tensors.values())
        with pytest.raises(TypeError, match="DTensor"):
            found.save("/nowhere")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"modules_to_save": ["head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "IA3"}, "IA3"),
    ],
)
def test_what_is_no_pair_of_factors_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ts.lora_adapter_of({"q.lora_A.weight": torch.ones(1, 1)}, config=config)


def test_a_model_without_an_adapter_or_config_is_refused() -> None:
    with pytest.raises(ValueError, match="no tensors"):
        ts.lora_adapter_of({"q.weight": torch.ones(1)}, config={"r": 1})
    with pytest.raises(ValueError, match="config="):
        ts.lora_adapter_of(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="'missing'"):
        ts.lora_adapter_of(adapted(), adapter="missing")


def test_what_is_saved_is_a_checkpoint_of_peft(tmp_path: Path) -> None:
    model = adapted(seed=5)
    ts.lora_adapter_of(model).save(tmp_path / "adapter")
    ts.lora_adapter_of(model).save(tmp_path / "adapter")  # in place
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert peft.PeftConfig.from_pretrained(str(tmp_path / "adapter")).rank_pattern == {"o_proj": 2}
    other = adapted(seed=6)
    peft.set_peft_model_state_dict(other, load_peft_weights(str(tmp_path / "adapter"), device="cpu"))
    tokens = torch.arange(12)
    assert torch.equal(other(tokens), model(tokens))


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 9}}])
def test_the_scales_are_those_of_peft(options: dict[str, Any]) -> None:
    model = adapted(**options)
    for product in ts.lora_adapter_of(model).products():
        layer = model.base_model.model.get_submodule(product.module)
        assert product.scale == pytest.approx(layer.scaling["default"])
        delta = (product.b @ product.a) * product.scale
        assert torch.allclose(delta.T if product.is_transposed else delta, layer.get_delta_weight("default"))


def test_what_cannot_be_added_is_refused() -> None:
    tensors = dict(ts.lora_adapter_of(adapted()).tensors)
    dora = ts.LoRAAdapter(tensors, {"use_dora": True, "lora_alpha": 1})
    with pytest.raises(ValueError, match="DoRA"):
        list(dora.products())
    tensors.pop("base_model.model.q_proj.lora_B.weight")
    with pytest.raises(ValueError, match="q_proj"):
        list(ts.LoRAAdapter(tensors, {"lora_alpha": 1}).products())
    with pytest.raises(ValueError, match="not a tensor of a LoRA"):
        list(ts.LoRAAdapter({"x": torch.ones(1)}, {}).products())
    assert math.isclose(
        next(
            iter(
                ts.LoRAAdapter(
                    {"m.lora_A.weight": torch.ones(2, 3), "m.lora_B.weight": torch.ones(3, 2)}, {}
                ).products()
            )
        ).scale,
        1.0,
    )
