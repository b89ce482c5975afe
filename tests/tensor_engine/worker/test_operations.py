"""Operations of torch do on the workers what they do in the script, in values, shapes, strides and dtypes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from skipper.control import ProcMesh
from skipper.tensor_engine import NotPropagatableError, Tensor, inspect

Check = Callable[[Callable[[], Any]], None]


def numbers(*shape: int) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    return torch.arange(count, dtype=torch.float32).reshape(shape) / 7 - 1


def viewed_and_changed() -> list[torch.Tensor]:
    x = numbers(4, 6)
    row, column, block = x[1], x[:, 2], x[1:3, ::2]
    row.add_(10)
    column.mul_(-1)
    block.copy_(torch.zeros(2, 3))
    x.view(-1)[5:7] = 99
    return [x, row, column, block]


def changed_in_shape() -> list[torch.Tensor]:
    x = numbers(3, 4)
    y = x.detach()
    x.t_().unsqueeze_(0).squeeze_(0)
    x += 1
    return [x, y]


def written_to_out() -> list[torch.Tensor]:
    x, out = numbers(3), torch.empty(3)
    result = torch.add(x, x, out=out)
    assert result is out
    values, indices = torch.empty(2), torch.empty(2, dtype=torch.long)
    torch.topk(x, 2, out=(values, indices))
    return [out, values, indices]


def of_many() -> list[torch.Tensor]:
    several = [numbers(2), numbers(3, 3), numbers(1)]
    torch._foreach_mul_(several, [1.0, 2.5, 3.0])
    torch._foreach_add_(several, 1)
    norms = torch._foreach_norm(several)
    return [*several, *norms, *torch._foreach_add(several, several, alpha=2)]


def promoted() -> list[torch.Tensor]:
    whole, half, real = torch.arange(4), torch.ones(4, dtype=torch.float16), numbers(4)
    return [
        whole + 1.5,
        whole / 2,
        half + real,
        whole * True,
        half * 2,
        (real > 0) & True,
        whole**2,
        real.to(torch.bfloat16),
    ]


def made() -> list[torch.Tensor]:
    return [
        torch.zeros(2, 3),
        torch.full((2,), 7),
        torch.arange(1, 9, 2),
        torch.linspace(0, 1, 5),
        torch.eye(3),
        torch.tensor([[1, 2], [3, 4]]),
        torch.tensor(2.5),
        torch.tensor([], dtype=torch.int32),
        torch.zeros_like(numbers(2, 2).t()),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j, 3j]),
    ]


def several_results() -> list[torch.Tensor]:
    x = numbers(4, 6)
    a, b = x.split([2, 4], dim=1)
    a.add_(1)
    values, indices = x.sort(dim=1, descending=True)
    return [a, b, x, values, indices, *x.unbind(0), *torch.chunk(x, 2), *torch.aminmax(x)]


def complex_ones() -> list[torch.Tensor]:
    x = torch.tensor([1 + 2j, 3 - 1j])
    return [x * 2j, x.real, x.abs(), torch.view_as_real(x), torch.fft.fft(x)]


def joined() -> list[torch.Tensor]:
    x, y = numbers(2, 3), numbers(2, 3)
    return [torch.cat([x, y, x]), torch.stack((x, y)), torch.einsum("ij,kj->ik", x, y), torch.where(x > 0, x, 0.0)]


def indexed() -> list[torch.Tensor]:
    x, at = numbers(5, 4), torch.tensor([0, 2, 2])
    y = x.clone()
    y[at] = 0
    y.index_add_(0, torch.tensor([1]), torch.ones(1, 4))
    return [
        x[at],
        x[at, torch.tensor([1, 2, 3])],
        x.gather(0, torch.zeros(1, 4, dtype=torch.long)),
        y,
        x.index_select(1, at),
    ]


def layers() -> list[torch.Tensor]:
    x = numbers(2, 3, 8, 8)
    weight = numbers(4, 3, 3, 3)
    y = torch.nn.functional.conv2d(x, weight, padding=1)
    z = torch.nn.functional.layer_norm(y, (8, 8))
    q = numbers(1, 2, 4, 8)
    attended = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    channels_last = torch.nn.functional.conv2d(x.to(memory_format=torch.channels_last), weight)
    return [y, z, attended, torch.nn.functional.max_pool2d(y, 2), channels_last]


def alike_and_the_same() -> list[torch.Tensor]:
    x, y = numbers(3), numbers(3)
    x.add_(y)
    x.add_(x)
    return [x, x + x[:], torch.cat([x, x])]


@pytest.mark.parametrize(
    "program",
    [
        viewed_and_changed,
        changed_in_shape,
        written_to_out,
        of_many,
        promoted,
        made,
        several_results,
        complex_ones,
        joined,
        indexed,
        layers,
        alike_and_the_same,
    ],
)
def test_operations_do_on_the_workers_what_they_do_in_the_script(
    program: Callable[[], list[torch.Tensor]], same_as_locally: Check
) -> None:
    same_as_locally(program)


def test_each_rank_has_its_own_values(four: ProcMesh) -> None:
    with four.activate():
        x = torch.ones(2) * (10 * four.rank_tensor("dp") + four.rank_tensors()["tp"])
    assert [[inspect(x, dp=dp, tp=tp).tolist() for tp in range(2)] for dp in range(2)] == [
        [[0, 0], [1, 1]],
        [[10, 10], [11, 11]],
    ]


def test_operations_follow_their_tensors_outside_of_the_block_and_in_that_of_another_mesh(four: ProcMesh) -> None:
    left, right = four.slice(dp=0), four.slice(dp=1)
    with left.activate():
        x = torch.ones(2)
        with right.activate():
            y = torch.ones(2) * 5
            z = x + 1
    w = y + 1
    assert (z.mesh, w.mesh) == (left, right)
    assert (inspect(z).tolist(), inspect(w, tp=1).tolist()) == ([2, 2], [6, 6])


def test_numbers_that_change_are_no_new_kind_of_operation(procs: ProcMesh) -> None:
    from skipper.tensor_engine.script import issue

    with procs.activate():
        x = torch.zeros(3)
        x = x * 0.5 + 1
        before = len(issue._sites)
        for step in range(20):
            x = x * (step / 3) + step
            x.add_(x, alpha=step)
    assert len(issue._sites) == before + 1  # the one of add_
    assert inspect(x).shape == (3,)


def test_what_depends_on_values_is_refused_with_a_way_out(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.tensor([0.0, 1.0])
        with pytest.raises(NotPropagatableError, match="remote function"):
            x.nonzero()
        with pytest.raises(NotPropagatableError, match="remote function"):
            x[x > 0]


def test_what_torch_refuses_is_refused_at_the_line(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.ones(2, 3)
        with pytest.raises(RuntimeError, match="reduction dim"):
            x @ x
        with pytest.raises(RuntimeError, match="expand"):
            x.expand(4, 3)
    assert isinstance(x, Tensor)


def test_numbers_of_the_first_rank_are_fetched_where_python_needs_them(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.arange(3.0)
    assert x.sum().item() == 3.0
    assert x[2] > 1
    assert float(x[1]) == 1.0
    assert x.tolist() == [0.0, 1.0, 2.0]
