"""Autograd is torch's own: modules, losses and optimizers as they are, with the gradients of a run in the script."""

import copy
import itertools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from skipper.control import ProcMesh
from skipper.tensor_engine import inspect, no_mesh
from skipper.tensor_engine.script import activation, issue, methods
from tests.tensor_engine.conftest import PATIENCE_S

Check = Callable[[Callable[[], Any]], None]


def start(model: nn.Module) -> nn.Module:
    """Weights that do not depend on a generator, which the workers do not share with the script."""
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            count = parameter.numel()
            parameter.copy_(torch.sin(torch.arange(count, dtype=torch.float32) + index).reshape(parameter.shape) / 3)
    return model


def inputs(*shape: int) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    return torch.cos(torch.arange(count, dtype=torch.float32)).reshape(shape)


def gradients_of_an_expression() -> list[torch.Tensor]:
    x, y = inputs(3, 4).requires_grad_(), inputs(4, 2).requires_grad_()
    z = (x @ y).relu().exp().sum() + (x * x).mean()
    z.backward()
    assert x.grad is not None
    assert y.grad is not None
    return [x.grad, y.grad, *torch.autograd.grad((x.sin() @ y).sum(), [x, y])]


def gradients_through_views_and_changes_in_place() -> list[torch.Tensor]:
    x = inputs(4, 4).requires_grad_()
    y = x * 2
    y[0].mul_(3)
    y[:, 1] += x[:, 2]
    view = y.t()[1:]
    view.add_(1)
    (view.square().sum() + y.sum()).backward()
    assert x.grad is not None
    return [x.grad, y]


def second_derivatives() -> list[torch.Tensor]:
    x = inputs(5).requires_grad_()
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return [first, second]


def hooks_and_accumulation() -> list[torch.Tensor]:
    x = inputs(3).requires_grad_()
    x.register_hook(lambda gradient: gradient * 2)
    for _ in range(3):
        (x * x).sum().backward()
    assert x.grad is not None
    return [x.grad]


def a_training(make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[torch.Tensor]:
    model = start(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)))
    optimizer = make_optimizer(list(model.parameters()))
    x, y = inputs(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def a_module_of_another_kind() -> list[torch.Tensor]:
    model = start(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))).double()
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(torch.float64)
    other.load_state_dict(model.state_dict())
    first, second = model(inputs(5, 3).double()), copy.deepcopy(other).train()(inputs(5, 3).double())
    (first * inputs(5, 4)).sum().backward()
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter)
    assert weight.grad is not None
    return [first, second, weight.grad, weight.data, *model.buffers()]


@pytest.mark.parametrize(
    "program",
    [
        gradients_of_an_expression,
        gradients_through_views_and_changes_in_place,
        second_derivatives,
        hooks_and_accumulation,
        a_module_of_another_kind,
    ],
)
def test_gradients_are_those_of_a_run_in_the_script(
    program: Callable[[], list[torch.Tensor]], same_as_locally: Check
) -> None:
    same_as_locally(program)


def test_what_autograd_makes_in_a_thread_of_its_own_lies_on_the_mesh_that_is_active(procs: ProcMesh) -> None:
    made: list[torch.Tensor] = []

    def run(mode: Any) -> None:
        with mode:  # autograd takes the modes of the thread that waits for it along, and nothing else
            made.append(torch.ones(2) + 1)

    with procs.activate():
        thread = threading.Thread(target=run, args=(activation._here.thread.mode,))
        thread.start()
        thread.join(PATIENCE_S)
    assert inspect(made[0], gpus=1).tolist() == [2, 2]


FORMULAS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.clamp(0.2, 0.8),
    lambda x: torch.where(x > 0.5, x, 0.0),
    lambda x: x.pow(3),
    lambda x: torch.pow(2, x),
    lambda x: nn.functional.normalize(x, dim=0),
    lambda x: torch.minimum(x * 2, x.clamp(0.9, 1.1) * 3),  # as PPO clips
    lambda x: x.norm(),
    lambda x: x.std(),
    lambda x: nn.functional.hardtanh(x).sum(),
    lambda x: nn.functional.smooth_l1_loss(x, x.detach().flip(0)),
]


@pytest.mark.parametrize(
    ("formula", "where"),
    [
        *itertools.product(FORMULAS, ["on the mesh", "on another mesh", "nowhere"]),
        *itertools.product([lambda x: nn.functional.hardtanh(x).prod()], ["on the mesh", "nowhere"]),
    ],
)
def test_a_derivative_is_computed_where_its_tensors_are(
    procs: ProcMesh, formula: Callable[[torch.Tensor], torch.Tensor], where: str
) -> None:
    values = [0.1, 0.45, 0.5, 0.9, 1.3]
    here = torch.tensor(values, requires_grad=True)
    formula(here).sum().backward()
    first = procs.slice(gpus=0)
    with first.activate():
        x = torch.tensor(values, requires_grad=True)
        loss = formula(x).sum()
    active = {"on the mesh": first.activate, "on another mesh": procs.slice(gpus=1).activate, "nowhere": nullcontext}
    with active[where]():
        loss.backward()
    assert x.grad is not None
    torch.testing.assert_close(inspect(x.grad, timeout=PATIENCE_S), here.grad)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
        lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    ],
    ids=["adamw_fused", "rprop", "amsgrad"],
)
def test_optimizers_step_where_no_mesh_is_active(
    procs: ProcMesh, make_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        optimizer = make_optimizer([x])
        for _ in range(3):
            optimizer.zero_grad()
            (x * x).sum().backward()
            optimizer.step()
        return x

    with procs.activate():
        there = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    found = inspect(run(there).detach(), timeout=PATIENCE_S)
    torch.testing.assert_close(found, run(torch.tensor([1.0, -2.0, 3.0], requires_grad=True)).detach())


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    ],
    ids=["sgd", "sgd_foreach", "adam", "adamw_fused", "adagrad"],
)
def test_a_module_is_trained_by_an_optimizer_as_in_the_script(
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], same_as_locally: Check
) -> None:
    same_as_locally(lambda: a_training(make_optimizer))


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
        lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    ],
    ids=["adam", "adamw_foreach", "nadam"],
)
def test_optimizers_that_count_steps_in_the_script_fetch_nothing(
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    same_as_locally: Check,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(value: object) -> None:
        raise AssertionError("a value was fetched")

    monkeypatch.setattr(issue, "fetch_first", refuse)
    monkeypatch.setattr(methods, "wired", replace(methods.wired, fetch_first=refuse))

    def train() -> list[torch.Tensor]:
        model = start(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)))
        optimizer = make_optimizer(list(model.parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs(6, 4)).square().mean().backward()
            with no_mesh():
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    same_as_locally(train)
