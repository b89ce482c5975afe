"""What is recorded of models that load as inference engines do."""

import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from skipper import torchstore as ts
from tests.torchstore.plans.engine import DTYPE, EngineModel, LookingModel, checkpoint_shapes, values_of

Weights = Iterable[tuple[str, torch.Tensor]]


class Loading(nn.Module):
    """One parameter, and what is done to fill it."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(shape, dtype=dtype))


def recorded(model: nn.Module, load: object, **shapes: tuple[int, ...]) -> ts.LoadPlan:
    """The plan of a function that is given the model's parameter and the checkpoint's tensors in order."""

    def load_weights(weights: Weights) -> None:
        load(model.w.data, *(tensor for _, tensor in weights))  # type: ignore[operator]

    given = {name: (shape, torch.float32) for name, shape in shapes.items()}
    return ts.record_plan(model, given, load_weights=load_weights)


def copy_lines(plan: ts.LoadPlan, path: Path) -> list[str]:
    """The lines about copies and fills in the plan's file."""
    plan.save(path)
    assert ts.LoadPlan.load(path) == plan
    return [line for line in path.read_text().splitlines() if line.startswith(('{"copy"', '{"fill"'))]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_fused_sharded_padded_model_is_recorded_without_a_whole_tensor(device: str) -> None:
    plan = ts.record_plan(EngineModel(1, 2, device), checkpoint_shapes())
    assert not plan.whole
    assert {fill.parameter for fill in plan.fills} == {"embed_tokens"}
    assert "lm_head" not in plan.parameters  # tied: it is filled once
    assert plan.skipped == tuple(name for name in checkpoint_shapes() if "rotary" in name or name == "model.head_bias")
    model = EngineModel(1, 2)
    assert {name for name, _ in model.named_parameters()} == set(plan.parameters)


def test_padding_of_no_rows_leaves_the_rows_that_are_there(tmp_path: Path) -> None:
    def load(w: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
        w[2:].copy_(high)
        w[:2].copy_(low)
        w[:2][low.shape[0] :].zero_()  # no row is left
        w[:2][low.shape[0] :].copy_(high[:0])

    plan = recorded(Loading(4, 3), load, low=(2, 3), high=(2, 3))
    assert copy_lines(plan, tmp_path / "plan.jsonl") == [
        '{"copy": "low", "from": "[0:2, 0:3]", "into": "w", "at": "[0:2, 0:3]"}',
        '{"copy": "high", "from": "[0:2, 0:3]", "into": "w", "at": "[2:4, 0:3]"}',
    ]


def test_recording_leaves_the_model_as_it_was() -> None:
    model = EngineModel(quantize=True)
    before = values_of(model)
    ts.record_plan(model, checkpoint_shapes())
    after = values_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_each_rank_reads_the_bytes_of_its_own_parameters() -> None:
    shapes = checkpoint_shapes()
    for rank in (0, 1):
        model = EngineModel(rank, 2)
        plan = ts.record_plan(model, shapes)
        padding = sum(fill.into.numel for fill in plan.fills)
        elements = sum(parameter.numel() for parameter in model.parameters()) - padding
        assert plan.nbytes == elements * DTYPE.itemsize + 2 * model.scale.numel()  # of float32, which is stored so


def test_quantized_tensors_are_named_as_whole_and_nothing_else_is() -> None:
    plan = ts.record_plan(EngineModel(0, 2, quantize=True), checkpoint_shapes())
    assert {name for group in plan.whole for name in group.names} == {
        f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 1)
    }
    assert all("aten." in group.reason for group in plan.whole)
    assert not any("o_proj" in copy.checkpoint for copy in plan.copies)


def test_a_tensor_whose_value_is_asked_for_is_named_as_whole() -> None:
    plan = ts.record_plan(LookingModel(), checkpoint_shapes())
    (group,) = plan.whole
    assert group.names == ("model.scale",)
    assert "its value is needed" in group.reason
    assert "scale" not in plan.parameters


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (
            lambda w, a, b: w.copy_(torch.cat([a, b])),
            [
                '{"copy": "a", "from": "[0:4, 0:6]", "into": "w", "at": "[0:4, 0:6]"}',
                '{"copy": "b", "from": "[0:4, 0:6]", "into": "w", "at": "[4:8, 0:6]"}',
            ],
        ),
        (
            lambda w, a, b: w.view(2, 4, 6).copy_(torch.stack([b, a])),
            [
                '{"copy": "b", "from": "[0:4, 0:6]", "into": "w", "at": "[0:4, 0:6]"}',
                '{"copy": "a", "from": "[0:4, 0:6]", "into": "w", "at": "[4:8, 0:6]"}',
            ],
        ),
        (
            lambda w, a, b: w.copy_(nn.functional.pad(a, (0, 0, 1, 3), value=2.0)),
            [
                '{"copy": "a", "from": "[0:4, 0:6]", "into": "w", "at": "[1:5, 0:6]"}',
                '{"fill": "w", "at": "[0:1, 0:6]", "value": 2.0}',
                '{"fill": "w", "at": "[5:8, 0:6]", "value": 2.0}',
            ],
        ),
        (
            lambda w, a, b: w[:6, :4].copy_(a.t()),
            ['{"copy": "a", "from": "[0:4, 0:6]", "into": "w", "at": "[0:6, 0:4]", "axes": [1, 0]}'],
        ),
        (
            lambda w, a, b: w[:4].copy_(a.bfloat16()),
            [
                '{"copy": "a", "from": "[0:4, 0:6]", "into": "w", "at": "[0:4, 0:6]", '
                '"casts": ["bfloat16", "float32"]}',
            ],
        ),
        (
            lambda w, a, b: (w.zero_(), w[2:4].copy_(a[::2]), w[2:3].copy_(b[3:])),
            [
                '{"copy": "b", "from": "[3:4, 0:6]", "into": "w", "at": "[2:3, 0:6]"}',
                '{"copy": "a", "from": "[2:3, 0:6]", "into": "w", "at": "[3:4, 0:6]"}',
                '{"fill": "w", "at": "[0:2, 0:6]", "value": 0.0}',
                '{"fill": "w", "at": "[4:8, 0:6]", "value": 0.0}',
            ],
        ),
        (
            lambda w, a, b: w[:4].view(2, 2, 6).copy_(a.view(2, 2, 6).transpose(0, 1)),
            [
                '{"copy": "a", "from": {"offset": 0, "strides": [6, 12, 1]}, "into": "w", "at": '
                '{"offset": 0, "strides": [12, 6, 1]}, "shape": [2, 2, 6]}',
            ],
        ),
        (
            lambda w, a, b: w[:2].copy_(a[0]),
            [
                '{"copy": "a", "from": "[0:1, 0:6]", "into": "w", "at": "[0:1, 0:6]"}',
                '{"copy": "a", "from": "[0:1, 0:6]", "into": "w", "at": "[1:2, 0:6]"}',
            ],
        ),
        (
            lambda w, a, b: w[4:].copy_(torch.zeros(4, 6).copy_(a)),
            ['{"copy": "a", "from": "[0:4, 0:6]", "into": "w", "at": "[4:8, 0:6]"}'],
        ),
        (
            lambda w, a, b: w[:5].copy_(torch.cat([a, torch.ones(1, 6)])),
            [
                '{"copy": "a", "from": "[0:4, 0:6]", "into": "w", "at": "[0:4, 0:6]"}',
                '{"fill": "w", "at": "[4:5, 0:6]", "value": 1.0}',
            ],
        ),
    ],
    ids=["cat", "stack", "pad", "transpose", "casts", "overwritten", "permuted rows", "repeated", "buffer", "constant"],
)
def test_what_is_done_to_a_tensor_can_be_read_in_the_file(load: object, expected: list[str], tmp_path: Path) -> None:
    plan = recorded(Loading(8, 6), load, a=(4, 6), b=(4, 6))
    assert not plan.whole
    assert copy_lines(plan, tmp_path / "plan.jsonl") == expected


@pytest.mark.parametrize(
    ("load", "names"),
    [
        (lambda w, a, b: w[:4].copy_(a * 2), [("a",)]),
        (lambda w, a, b: w[:4].copy_(a + b), [("a", "b")]),
        (lambda w, a, b: (w[:4].copy_(a), w[4:].copy_(b), w[:4].mul_(2)), [("a",)]),
        (lambda w, a, b: (w[:4].copy_(a), w[4:].copy_(b), w.mul_(2)), [("a", "b")]),
        (lambda w, a, b: w[:4].copy_(a[[2, 1, 0, 3]]), [("a",)]),
        (lambda w, a, b: w[:4].view(torch.int32).copy_(a.view(torch.int32)), [("a",)]),
        (lambda w, a, b: w[:4].copy_(b if bool(a.sum() > 0) else a), [("a",)]),
        (lambda w, a, b: w[: int(a.nonzero().shape[0])].copy_(b), [("a",)]),
        (lambda w, a, b: (w[:4].copy_(a), w[4:].copy_(torch.arange(24.0).view(4, 6))), [("b",)]),
    ],
    ids=["times", "sum", "in place", "in place on both", "index", "bits", "branch", "shape", "from elsewhere"],
)
def test_what_no_copy_can_say_is_left_to_the_model_itself(load: object, names: list[tuple[str, ...]]) -> None:
    def tolerant(w: torch.Tensor, *tensors: torch.Tensor) -> None:
        if len(tensors) == 2:
            load(w, *tensors)  # type: ignore[operator]

    plan = recorded(Loading(8, 6), tolerant, a=(4, 6), b=(4, 6))
    assert [group.names for group in plan.whole] == names
    assert not {copy.checkpoint for copy in plan.copies} & {name for group in names for name in group}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_parameter_that_is_replaced_is_left_to_the_model_and_given_back(device: str) -> None:
    model = Loading(4, 6).to(device)
    own, data = model.w, model.w.data

    def load(weights: Weights) -> None:
        for _, tensor in weights:
            if device == "meta":  # torch refuses to put it into a parameter of another device
                model.w.data = tensor.t().contiguous()
            model.w = nn.Parameter(tensor)

    plan = ts.record_plan(model, {"a": ((4, 6), torch.float32)}, load_weights=load)
    assert [group.names for group in plan.whole] == [("a",)]
    assert model.w is own
    assert model.w.data.shape == data.shape
    assert model.w.data_ptr() == data.data_ptr()


def test_a_load_weights_that_raises_is_named_with_the_tensor() -> None:
    def load(weights: Weights) -> None:
        for name, _ in weights:
            if name == "b":
                raise ValueError("no such expert")

    shapes = {"a": ((4, 6), torch.float32), "b": ((4, 6), torch.float32)}
    with pytest.raises(ts.RecordingError, match=r"at 'b'\): it raised ValueError: no such expert") as caught:
        ts.record_plan(Loading(4, 6), shapes, load_weights=load)
    assert caught.value.tensor == "b"
    assert isinstance(caught.value.__cause__, ValueError)


def test_values_from_nowhere_before_the_first_tensor_are_refused() -> None:
    model = Loading(4)

    def load(weights: Weights) -> None:
        model.w.data.copy_(torch.arange(4.0))

    with pytest.raises(ts.RecordingError, match="fills w from another source"):
        ts.record_plan(model, {"a": ((4,), torch.float32)}, load_weights=load)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="has no load_weights"):
        ts.record_plan(nn.Linear(2, 2), {})
    with pytest.raises(TypeError, match="'a': a tensor"):
        ts.record_plan(EngineModel(), {"a": 3})  # type: ignore[dict-item]


def test_what_is_kept_outside_of_parameters_is_left_to_the_model() -> None:
    model = Loading(4, 6)
    own: dict[str, torch.Tensor] = {"scale": torch.zeros(6)}

    def load(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> None:
        w.copy_(torch.empty(4, 6).copy_(a))  # a buffer that is gone afterwards
        own["scale"].copy_(b)
        own["kept"] = c[:2]
        own["computed"] = d.float() * 2

    plan = recorded(model, load, a=(4, 6), b=(6,), c=(6,), d=(6,))
    assert [group.names for group in plan.whole] == [("b",), ("c",), ("d",)]
    assert {copy.checkpoint for copy in plan.copies} == {"a"}
    assert own["scale"].tolist() == [0] * 6


def test_a_model_without_parameters_has_an_empty_plan() -> None:
    plan = ts.record_plan(nn.Identity(), {}, load_weights=list)
    assert (plan.copies, plan.whole, plan.nbytes) == ((), (), 0)


def test_a_mistake_of_the_loader_is_no_look_at_a_value() -> None:
    with pytest.raises(ts.RecordingError, match="it raised RuntimeError") as caught:
        recorded(Loading(4, 6), lambda w, a: w.copy_(a @ a), a=(4, 6))
    assert caught.value.tensor == "a"


@pytest.mark.parametrize("look", [lambda a: a.tolist(), lambda a: a.numpy(), lambda a: float(a[0]), lambda a: repr(a)])
def test_any_look_at_values_ends_in_a_plan_or_an_error(look: Callable[[torch.Tensor], object]) -> None:
    def load(w: torch.Tensor, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            look(tensor)
            w.copy_(tensor)

    with suppress(ts.RecordingError):
        plan = recorded(Loading(4), load, a=(4,))
        assert plan.whole or len(plan.copies) == 1


def test_inference_mode_makes_no_difference(tmp_path: Path) -> None:
    def load(w: torch.Tensor, a: torch.Tensor) -> None:
        with torch.inference_mode():
            w.copy_(torch.vstack(a.t().contiguous().reshape(-1).view(6, 4).chunk(2)).to(torch.float32))

    plan = recorded(Loading(6, 4), load, a=(4, 6))
    assert not plan.whole
    lines = copy_lines(plan, tmp_path / "plan.jsonl")
    assert [line.split('"at": ')[1] for line in lines] == [
        '"[0:3, 0:4]", "axes": [1, 0]}',
        '"[3:6, 0:4]", "axes": [1, 0]}',
    ]


def test_scattered_elements_are_read_whole() -> None:
    plan = recorded(Loading(5000, 1), lambda w, a: w.copy_(a[:, 3:4][::2]), a=(10000, 8))
    assert [group.names for group in plan.whole] == [("a",)]


def some_change(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """One of the things that loaders do to a tensor before they copy it."""
    dim = chance.randrange(tensor.ndim)
    size = tensor.shape[dim]
    match chance.randrange(8):
        case 0 if size > 1:
            kept = chance.randint(1, size)
            return tensor.narrow(dim, chance.randint(0, size - kept), kept)
        case 1:
            return tensor.transpose(dim, chance.randrange(tensor.ndim))
        case 2 if size % 2 == 0:
            return tensor.unflatten(dim, (2, -1))
        case 3 if tensor.ndim > 1:
            return tensor.flatten(0, 1)
        case 4:
            return tensor.contiguous()
        case 5 if tensor.ndim < 4:
            return torch.stack([tensor, tensor.clone()], dim)
        case 6:
            return torch.cat([tensor, torch.full_like(tensor, 3)], dim)
        case 7:
            return tensor.bfloat16()
    return tensor


def fill_by(plan: ts.LoadPlan, model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """What `load_by_plan` does, by torch alone."""
    for fill in plan.fills:
        parameter = model.get_parameter(fill.parameter).data
        parameter.as_strided(fill.into.shape, fill.into.strides, fill.into.offset).fill_(fill.value)
    for copy in plan.copies:
        parameter, tensor = model.get_parameter(copy.parameter).data, values[copy.checkpoint]
        source = tensor.as_strided(copy.source.shape, copy.source.strides, copy.source.offset)
        for cast in copy.casts:
            source = source.to(getattr(torch, cast.removeprefix("torch.")))
        parameter.as_strided(copy.into.shape, copy.into.strides, copy.into.offset).copy_(source)
        for block in copy.blocks(tuple(tensor.shape)):
            box = tensor[tuple(slice(at, at + size) for at, size in zip(block.offsets, block.into.shape, strict=True))]
            view = parameter.as_strided(block.into.shape, block.into.strides, block.into.offset)
            assert torch.equal(view, box.to(parameter.dtype)) or copy.casts


@pytest.mark.parametrize("seed", range(150))
def test_whatever_a_loader_does_the_plan_does_the_same(seed: int, tmp_path: Path) -> None:
    def load(w: torch.Tensor, a: torch.Tensor) -> None:
        chance = random.Random(seed)
        for _ in range(2):
            tensor = a
            for _ in range(chance.randint(1, 6)):
                tensor = some_change(tensor, chance)
            number = min(w.numel(), tensor.numel())
            start = chance.randint(0, w.numel() - number)
            room = w.view(-1)[start : start + number]
            if tensor.numel() == number and chance.randrange(2):
                room.view(tensor.shape).copy_(tensor)
            else:
                room.copy_(tensor.reshape(-1)[:number])

    values = {"a": torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))}
    expected, model = Loading(16, 12), Loading(16, 12)
    load(expected.w.data, values["a"])
    plan = recorded(model, load, a=(6, 8))
    copy_lines(plan, tmp_path / "plan.jsonl")
    if not plan.whole:
        fill_by(plan, model, values)
        assert torch.equal(model.w, expected.w)


def test_few_of_the_things_that_loaders_do_need_whole_tensors() -> None:
    whole = 0
    for seed in range(150):

        def load(w: torch.Tensor, a: torch.Tensor, seed: int = seed) -> None:
            chance, tensor = random.Random(seed), a
            for _ in range(chance.randint(1, 6)):
                tensor = some_change(tensor, chance)
            w.view(-1)[: min(tensor.numel(), 192)].copy_(tensor.reshape(-1)[:192])

        whole += len(recorded(Loading(16, 12), load, a=(6, 8)).whole)
    assert whole < 25
