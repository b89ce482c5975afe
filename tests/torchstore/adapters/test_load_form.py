"""Plans of a vLLM model, cut and put together; `tests/engines` has the real thing."""

from importlib import import_module
from typing import Any

import torch

from skipper.torchstore import LoadPlan, record_plan
from tests.torchstore import stand_ins

stand_ins.install()
load_form: Any = import_module("skipper.torchstore.adapters.vllm.load_form")


class Layer(torch.nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, 4))
        self.bias = torch.nn.Parameter(torch.zeros(rows))


class Layers(torch.nn.Module):
    """Two layers that take copies; the bias of the second one takes a value that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(4), Layer(8)
        self.calls: list[str] = []

    def load_weights(self, weights: Any) -> set[str]:
        own = dict(self.named_parameters())
        names = set()
        for name, weight in weights:
            own[name].data.copy_(weight.abs() if name == "second.bias" else weight)
            names.add(name)
        return names


def shapes(model: torch.nn.Module) -> dict[str, Any]:
    return {name: (tuple(weight.shape), weight.dtype) for name, weight in model.named_parameters()}


def test_parts_of_a_plan_hold_whole_layers_up_to_a_size_and_are_all_of_it() -> None:
    model = Layers()
    plan = record_plan(model, shapes(model))
    assert next(iter(load_form.parts_of(plan, None))).parameters == plan.parameters
    parts: list[LoadPlan] = list(load_form.parts_of(plan, 100))
    assert [list(part.parameters) for part in parts] == [["first.weight", "first.bias"], ["second.weight"]]
    assert [len(part.whole) for part in parts] == [1, 0]  # once
    assert sum(part.nbytes for part in parts) == plan.nbytes
    assert [copy for part in parts for copy in part.copies] == list(plan.copies)
    assert load_form.filled_numel(plan) == {name: each.all.numel for name, each in plan.parameters.items()}
    assert load_form.all_whole(plan, "why").nbytes == plan.nbytes


def test_what_was_read_by_a_plan_and_what_was_read_whole_meet_in_the_model() -> None:
    model = Layers()
    form = load_form.LoadForm(model, None)
    recorded = form.record(shapes(model))
    assert recorded.loaded == {"first.weight", "first.bias", "second.weight", "second.bias"}
    assert form.missing(recorded.loaded) == []
    assert form.missing(recorded.loaded - {"first.bias"}) == ["first.bias"]
    staged = {name: load_form.empty_for(each, torch.device("cpu")) for name, each in recorded.plan.parameters.items()}
    assert set(dict(load_form.module_of(staged).named_buffers())) == set(staged)
    with form.reloading():
        form.place({name: tensor + 1 for name, tensor in staged.items()}, {"second.bias": torch.full((8,), -2.0)})
    values = {name: float(weight.detach().unique()) for name, weight in model.named_parameters()}
    assert values == {"first.weight": 1.0, "first.bias": 1.0, "second.weight": 1.0, "second.bias": 2.0}


def test_a_layer_that_shares_its_weight_is_given_it_too() -> None:
    model = Layers()
    model.second.weight = model.first.weight
    form = load_form.LoadForm(model, None)
    recorded = form.record({"first.weight": ((4, 4), torch.float32)})
    form.begin()
    model.second.weight = torch.nn.Parameter(torch.zeros(4, 4))  # as vLLM has one in each layer while it loads
    form.place({"first.weight": torch.ones(4, 4)}, {})
    form.end()
    assert [float(layer.weight.detach().unique()) for layer in (model.first, model.second)] == [1.0, 1.0]
    assert list(recorded.plan.parameters) == ["first.weight"]


def test_a_source_of_shards_renames_and_is_described_alike_by_each_release() -> None:
    vllm: Any = import_module("skipper.torchstore.adapters.vllm")
    sources: Any = import_module("skipper.torchstore.adapters.vllm.sources")
    source = vllm.ShardSource(Layer(4), {"bias": "model.bias"})
    assert list(source.weights()) == ["weight", "model.bias"]
    (weight, _) = sources.described(source)
    assert (weight.name, weight.dtype, weight.shape, weight.owners) == ("weight", torch.float32, (4, 4), None)
    assert [name for name, _ in sources.whole_tensors(source)] == ["weight", "model.bias"]
