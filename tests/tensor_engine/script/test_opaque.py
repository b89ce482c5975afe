"""Objects and modules on the workers, and functions with their own backward, against the same in one process."""

from typing import Any

import pytest
import torch

from skipper.control import ProcMesh
from skipper.tensor_engine import (
    OpaqueModule,
    OpaqueObject,
    OpaqueRef,
    RemoteError,
    grad_function,
    inspect,
    opaque_method,
    remote,
)
from tests.tensor_engine import user_functions as functions
from tests.tensor_engine.conftest import PATIENCE_S

HERE = "tests.tensor_engine.user_functions"


class Account(OpaqueObject):
    """The script's side of `functions.Account`."""

    @opaque_method
    def deposit(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        return x.new_empty(x.shape)


def at(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [inspect(tensor, gpus=rank, timeout=PATIENCE_S) for rank in range(2)]


def ranked(procs: ProcMesh, *shape: int) -> torch.Tensor:
    with procs.activate():
        return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape) * (procs.rank_tensor("gpus") + 1)


def test_methods_of_an_object_run_on_each_worker_with_its_state(procs: ProcMesh) -> None:
    x = ranked(procs, 3)
    with procs.activate():
        accounts = [Account(f"{HERE}.Account", x), Account(functions.Account, x)]
    for account in accounts:
        account.deposit(x)
        result = account.deposit(x, times=3)
        for found, local in zip(at(result), at(x), strict=True):
            torch.testing.assert_close(found, 5 * local)
        assert account.call_method_on_shard_and_fetch("count", shard={"gpus": 1}).get(PATIENCE_S) == 2
        torch.testing.assert_close(at(account.call_method("above", "inspect", 0.0))[0], torch.tensor([5.0]))
    account.call_method("missing", None)
    again = Account(accounts[0])
    assert again.ref is accounts[0].ref
    with pytest.raises(ValueError, match="on the workers"):
        again.call_method("count", "cached")
    with pytest.raises(RemoteError, match="AttributeError"):
        inspect(again.call_method("missing", lambda: torch.empty(2)), timeout=PATIENCE_S)


@pytest.mark.parametrize("propagator", [None, lambda x, scale: x.new_empty(x.shape[0], 2)])
def test_a_module_trains_as_it_does_in_one_process(procs: ProcMesh, propagator: Any) -> None:
    x = ranked(procs, 4, 3).requires_grad_()
    with procs.activate():
        module = OpaqueModule(f"{HERE}.Scaled", 3, 2)
    named = dict(module.named_parameters())
    assert [(name, tuple(p.shape), p.requires_grad) for name, p in named.items()] == [
        ("frozen", (2,), False),
        ("unused", (), True),
        ("linear.weight", (2, 3), True),
        ("linear.bias", (2,), True),
    ]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    grads: list[torch.Tensor] = []
    losses: list[torch.Tensor] = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = module(x.sin(), scale=2.0, propagator=propagator).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert x.grad is not None
    grads = [x.grad, *named.values()]
    for rank in range(2):
        local = functions.Scaled(3, 2)
        steps = torch.optim.SGD(local.parameters(), lr=0.1)
        here = at(x.detach())[rank].requires_grad_()
        for step in range(2):
            steps.zero_grad()
            loss = local(here.sin(), scale=2.0).square().sum()
            loss.backward()
            steps.step()
            torch.testing.assert_close(at(losses[step])[rank], loss.detach())
        assert here.grad is not None
        for found, wanted in zip(grads, [here.grad, *local.parameters()], strict=True):
            torch.testing.assert_close(at(found.detach())[rank], wanted.detach())
    with torch.no_grad():
        torch.testing.assert_close(at(module(x, scale=2.0, propagator=propagator))[1], local(here, scale=2.0))


def test_a_function_with_its_own_backward_gives_the_gradients_that_it_says(procs: ProcMesh) -> None:
    @grad_function
    def clipped(batch: dict[str, Any], factor: float, bias: torch.Tensor) -> Any:
        x = batch["x"]

        def backward(grad: torch.Tensor, unused: torch.Tensor) -> list[torch.Tensor | None]:
            assert not torch.is_grad_enabled()
            return [grad.clamp(-1, 1) * factor, grad.sum(0)]

        return {"out": [x * factor + bias, "label"], "norm": x.square().sum()}, backward

    def program(x: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor | None]:
        x.requires_grad_()
        bias.requires_grad_()
        result = clipped({"x": x.sin()}, 3.0, bias)
        assert result["out"][1] == "label"
        (result["out"][0] * 10).sum().backward()
        return [result["out"][0].detach(), x.grad, bias.grad]

    x, bias = ranked(procs, 4, 3), ranked(procs, 3)
    for found, first, second in zip(
        program(x, bias), *[program(a, b) for a, b in zip(at(x), at(bias), strict=True)], strict=True
    ):
        assert found is not None
        torch.testing.assert_close(at(found)[0], first)
        torch.testing.assert_close(at(found)[1], second)


def test_its_parts_may_be_remote_and_on_several_meshes(procs: ProcMesh, four: ProcMesh) -> None:
    there = four.slice(dp=1).rename(tp="gpus")

    @grad_function
    def across(x: torch.Tensor) -> Any:
        graph, out = remote(functions.cube, propagate=lambda x: (OpaqueRef(), x))(x.to_mesh(there))  # type: ignore[attr-defined]

        def backward(grad: torch.Tensor) -> torch.Tensor:
            back = remote(functions.cube_back, propagate=lambda graph, grad: grad)(graph, grad.to_mesh(there))  # type: ignore[attr-defined]
            return back.to_mesh(procs)  # type: ignore[no-any-return]

        return out.to_mesh(procs), backward

    x = ranked(procs, 3).requires_grad_()
    across(x * 2).sum().backward()
    assert x.grad is not None
    for found, local in zip(at(x.grad), at(x.detach()), strict=True):
        torch.testing.assert_close(found, 24 * local**2)


def test_a_backward_that_returns_too_little_is_an_error() -> None:
    @grad_function
    def wrong(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x + y, lambda grad: grad

    with pytest.raises(ValueError, match="1 gradients for 2 tensors"):
        wrong(torch.ones(2, requires_grad=True), torch.ones(2)).sum().backward()
    assert not wrong(torch.ones(2), torch.ones(2)).requires_grad
