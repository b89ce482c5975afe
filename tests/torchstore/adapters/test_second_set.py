"""A second set of a model's weights: what is loaded into it takes the model's place as a whole, or not at all."""

import gc
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skipper import torchstore as ts
from tests.torchstore import stand_ins

stand_ins.install()
second_sets: Any = import_module("skipper.torchstore.adapters.vllm.second_set")
CPU = torch.device("cpu")
LAYERS = 12


class Scheme:
    """What processes weights beside the modules, as vLLM's quantization methods do: it keeps what it made."""

    def __init__(self) -> None:
        self.scale = 0.0

    def process_weights_after_loading(self, layer: Any) -> None:
        self.scale = float(layer.weight.detach()[0, 0])


class Layer(torch.nn.Module):
    """Its version is said by four things: a parameter, a buffer, a function made after loading, and its scheme."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 4))
        self.register_buffer("table", torch.zeros(4))
        self.scheme = Scheme()
        self.packed: Callable[[], float] = lambda: 0.0

    def forward(self) -> list[float]:
        return [float(self.weight.detach()[1, 1]), float(self.table[2]), self.packed(), self.scheme.scale]


class Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = torch.nn.Linear(4, 4, bias=False)
        self.head.weight = self.layers[0].weight  # type: ignore[assignment]

    def forward(self) -> set[float]:
        """The versions that one step sees."""
        return {number for layer in self.layers for number in layer()} | {float(self.head.weight.detach()[0, 0])}


def load(model: torch.nn.Module, version: float, *, functions: bool = True) -> None:
    """As an engine loads and processes weights, layer by layer."""
    with torch.no_grad():
        for layer in model.layers:  # type: ignore[union-attr]
            layer.weight.fill_(version)
            layer.table.fill_(version)
            if functions:
                layer.packed = lambda: version
                layer.scheme.process_weights_after_loading(layer)


def second_set(model: torch.nn.Module, *, enforce_eager: bool = True, **options: Any) -> Any:
    config = stand_ins.worker_config(enforce_eager=enforce_eager, **options.pop("parallel", {}))
    return second_sets.SecondSet(model, config, CPU, **{"staging_nbytes": 1000, **options})


def test_what_is_loaded_takes_the_models_place_as_a_whole_and_back() -> None:
    model = Stack()
    load(model, 1.0)
    second = second_set(model)
    assert (second.flip_by, second.nbytes) == ("pointers", LAYERS * (16 + 4) * 4)  # the head's weight is a layer's
    before = model.layers[3].weight
    for version in (2.0, 3.0, 4.0):
        second.begin()
        load(second.model, version)
        assert model() == {version - 1}
        second.flip()
        assert model() == {version}
        assert second.model.head.weight is second.model.layers[0].weight
        assert model.head.weight is model.layers[0].weight
        assert (model.layers[3].weight is before) == (version == 3.0)  # the two sets take turns
    assert isinstance(model.layers[3].weight, torch.nn.Parameter)


def test_where_addresses_have_to_stay_values_are_copied() -> None:
    model = Stack()
    second = second_set(model, enforce_eager=False)
    assert (second.flip_by, second.why_copy) == ("copy", "vLLM runs without enforce_eager")
    places = [tensor.data_ptr() for tensor in model.parameters()]
    for version in (1.0, 2.0):
        second.begin()
        load(second.model, version, functions=False)
        second.check()
        second.flip()
        assert [tensor.data_ptr() for tensor in model.parameters()] == places
        assert {float(layer.weight.detach()[0, 0]) for layer in model.layers} == {version}  # type: ignore[operator, union-attr]
        assert {float(layer.table[0]) for layer in model.layers} == {version}  # type: ignore[index, union-attr]
    second.begin()
    load(second.model, 3.0)
    for refused in (second.check, second.flip):
        replaced = r"'(packed' of Layer|scale' of Scheme) by a new tensor.*enforce_eager"
        with pytest.raises(ts.SecondSetError, match=replaced):
            refused()
    assert float(model.layers[0].weight.detach()[0, 0]) == 2.0  # type: ignore[operator, union-attr]


def test_a_parameter_that_something_else_holds_keeps_its_address() -> None:
    model = Stack()
    kernel = SimpleNamespace(weights=[model.layers[1].weight])
    second = second_set(model)
    assert second.flip_by == "copy"
    assert second.why_copy == "a list outside of the modules holds one of their tensors"
    load(second.model, 5.0, functions=False)
    second.flip()
    assert float(kernel.weights[0].detach()[0, 0]) == 5.0


def test_garbage_that_holds_a_parameter_does_not_count() -> None:
    model = Stack()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        garbage: list[Any] = [model.layers[1].weight]
        garbage.append(garbage)
        del garbage
        second = second_set(model)
    finally:
        if was_enabled:
            gc.enable()
    assert (second.flip_by, second.why_copy) == ("pointers", "")


def test_attributes_that_the_engine_changes_while_it_serves_stay() -> None:
    model = Stack()
    second = second_set(model)
    model.layers[0].served = 1  # type: ignore[assignment]
    second.begin()
    load(second.model, 1.0)
    model.layers[0].served = 7  # type: ignore[assignment]
    second.flip()
    assert (model.layers[0].served, model()) == (7, {1.0})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parallel": {"enable_eplb": True}}, "EPLB moves experts"),
        ({"limit_nbytes": LAYERS * 80 + 1000 + 2 * 64 - 1}, r"takes 960 bytes on cpu, and .* 1,128 more; .* 2,087"),
        ({"staging_nbytes": 1 << 60}, "are free: give vLLM less"),
    ],
)
def test_an_engine_that_cannot_have_one_is_told_before_it_begins(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ts.SecondSetError, match=said):
        second_set(Stack(), **options)


def steps_beside(change: Callable[[float], None], between: Callable[[], None], model: Stack) -> Iterator[set[float]]:
    """What steps see while a thread makes one version after the other; ``between`` is called when one is there."""
    wanted, there = threading.Semaphore(0), threading.Event()
    numbers = iter(range(1, 41))

    def produce() -> None:
        for number in numbers:
            wanted.acquire()
            change(float(number))
            there.set()

    thread = threading.Thread(target=produce)
    thread.start()
    wanted.release()
    for _ in range(100_000):
        yield model()
        if there.is_set():
            there.clear()
            between()
            wanted.release()
        if not thread.is_alive():
            break
    thread.join(20)


def test_each_step_sees_one_version_while_others_are_loaded() -> None:
    model = Stack()
    second = second_set(model)

    def flip() -> None:
        second.flip()
        second.begin()

    seen = list(steps_beside(lambda number: load(second.model, number), flip, model))
    assert all(len(versions) == 1 for versions in seen)
    order = [next(iter(versions)) for versions in seen]
    assert order == sorted(order)
    assert model() == {40.0} or model() == {39.0}


def test_a_step_amid_a_load_without_a_second_set_would_see_a_mixture() -> None:
    """So the test above can fail."""
    model = Stack()
    load(model, 1.0)
    model.layers[0].weight.data.fill_(2.0)  # type: ignore[operator, union-attr]
    assert model() == {1.0, 2.0}
