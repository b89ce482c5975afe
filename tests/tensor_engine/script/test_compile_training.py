"""Compiled training steps: gradients, optimizers and modules as in eager steps."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from skipper.control import ProcMesh
from skipper.tensor_engine import CompileError, compile
from tests.tensor_engine.looking import holds, numbers, same


def training(
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    compiled: bool,
    zero_first: bool,
    mesh: ProcMesh,
) -> list[torch.Tensor]:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(numbers(*parameter.shape) / 3 + index / 10)
    parameters = list(model.parameters())
    optimizer = make_optimizer(parameters)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if zero_first:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in parameters:
            parameter.grad.reduce_("gpus", "avg")  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()
        return loss

    run = compile(step) if compiled else step
    rank, y = mesh.rank_tensor("gpus"), torch.tensor([0, 1, 2, 0, 1, 2])
    losses = [run(numbers(6, 4) + shift + rank, y) for shift in range(20)]
    if compiled:
        assert run.programs <= 2  # type: ignore[attr-defined]  # without gradients at first, and with
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert len(gradients) == (len(parameters) if zero_first else 0)
    return [torch.stack([loss.detach() for loss in losses]), *parameters, *gradients]


@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    ],
    ids=["sgd", "sgd_foreach", "adam_fused", "adamw_fused"],
)
def test_a_training_step_has_the_losses_gradients_and_weights_of_eager_steps(
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], zero_first: bool, active: ProcMesh
) -> None:
    there = [training(make_optimizer, compiled, zero_first, active) for compiled in (False, True)]
    for eager, replayed in zip(*there, strict=True):
        same(eager, replayed)


def test_gradients_add_up_where_nothing_sets_them_to_none(active: ProcMesh) -> None:
    def run(compiled: bool) -> list[torch.Tensor]:
        weight = numbers(3).requires_grad_()

        def add(x: torch.Tensor) -> None:
            (weight * x).square().sum().backward()  # type: ignore[no-untyped-call]

        call = compile(add) if compiled else add
        found = []
        for shift in range(6):
            if shift == 4:
                weight.grad = None
            call(numbers(3) + shift)
            assert weight.grad is not None
            found.append(weight.grad.clone())
        return found

    for eager, replayed in zip(run(False), run(True), strict=True):
        same(eager, replayed)


def test_parameters_are_found_that_the_garbage_collector_does_not_look_at(active: ProcMesh) -> None:
    weight = numbers(3).requires_grad_()

    @compile
    def add(x: torch.Tensor) -> None:
        (weight * x).sum().backward()  # type: ignore[no-untyped-call]

    gc.freeze()
    try:
        for shift in range(4):
            weight.grad = None
            add(numbers(3) + shift)
            assert weight.grad is not None
            same(weight.grad, numbers(3) + shift)
            add(numbers(3) + shift)
            same(weight.grad, 2 * (numbers(3) + shift))
    finally:
        gc.unfreeze()


def test_a_parameter_that_is_frozen_gets_no_gradient_any_more(active: ProcMesh) -> None:
    weight, bias = numbers(2).requires_grad_(), numbers(2).requires_grad_()

    @compile
    def step(x: torch.Tensor) -> None:
        weight.grad = bias.grad = None
        (weight * x + bias).sum().backward()  # type: ignore[no-untyped-call]

    for _ in range(3):
        step(torch.ones(2))
        assert bias.grad is not None
    bias.requires_grad_(False)
    for shift in range(3):
        step(torch.ones(2) + shift)
        assert bias.grad is None
        assert weight.grad is not None
        holds(weight.grad, [1.0 + shift] * 2)


def test_gradients_of_arguments_are_those_of_each_call(active: ProcMesh) -> None:
    @compile
    def gradient(x: torch.Tensor) -> torch.Tensor:
        y = (x**3).sum()
        y.backward()  # type: ignore[no-untyped-call]
        return y.detach()

    for shift in range(3):
        x = (numbers(4) + shift).requires_grad_()
        gradient(x)
        assert x.grad is not None
        same(x.grad, 3 * x.detach() ** 2)
        gradient(x)
        same(x.grad, 6 * x.detach() ** 2)


def test_modes_of_modules_and_settings_of_optimizers_are_looked_at(active: ProcMesh) -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    dropout = nn.Dropout(1.0)

    @compile
    def step(x: Any) -> Any:
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()
        return dropout(x)

    for rate in (1.0, 1.0, 1.0, 0.25, 0.25, 1.0):
        optimizer.param_groups[0]["lr"] = rate
        step(torch.ones(2))
    holds(weight, [-4.5] * 2)
    holds(step(torch.ones(2)), [0, 0])
    dropout.eval()
    holds(step(torch.ones(2)), [1, 1])


def test_an_optimizer_that_reads_its_step_is_refused_with_another_choice(active: ProcMesh) -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([weight], lr=0.1)

    @compile
    def step() -> None:
        (weight * 2).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    with pytest.raises(CompileError, match="fused=True"):
        step()


def test_gradients_do_not_flow_through_a_compiled_function_unseen(active: ProcMesh) -> None:
    weight = numbers(3).requires_grad_()
    program = compile(lambda x: (weight * x).sum())
    for _ in range(3):
        result = program(torch.ones(3))
        assert result.requires_grad
        with pytest.raises(CompileError, match="inside"):
            result.backward()
    outside = weight * 2
    with pytest.raises(CompileError, match="detach"):
        program(outside)
    with pytest.raises(CompileError, match="detach"):
        compile(lambda: outside * 2)()
    same(compile(lambda x: x * 2)(outside.detach()), outside.detach() * 2)
