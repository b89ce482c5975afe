"""What scripts do with torch beside plain operations: conjugates, ``out=``, attention, compilers, other meshes."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from skipper.control import ProcMesh
from skipper.tensor_engine import (
    LocalTensorError,
    MeshMismatchError,
    NotPropagatableError,
    RemoteError,
    compile,
    inspect,
    remote,
    to_mesh,
)
from tests.tensor_engine.conftest import PATIENCE_S

Check = Callable[[Callable[[], Any]], None]


@pytest.fixture(scope="module")
def both(procs: ProcMesh) -> tuple[ProcMesh, ProcMesh]:
    """The first and the second worker, as two meshes."""
    return procs.slice(gpus=0), procs.slice(gpus=1)


def at(tensor: torch.Tensor, **place: int) -> torch.Tensor:
    return inspect(tensor.detach(), place, timeout=PATIENCE_S)


def spiral() -> torch.Tensor:
    return torch.polar(torch.arange(1.0, 5.0), torch.arange(4.0))


def parts_of_conjugates() -> list[torch.Tensor]:
    x = spiral()
    y = x.conj()
    return [
        y.real + 0,
        y.imag + 0,
        y[1:].imag * 2,
        y * x,
        (y.reshape(2, 2).mH @ x.reshape(2, 2)).real + 0,
        x.conj().conj() + 0,
    ]


def changes_through_conjugates() -> list[torch.Tensor]:
    x = spiral()
    y = x.conj()
    y.imag.mul_(3)
    y[0] = 1j
    y.add_(2)
    return [x]


def gradients_through_conjugates() -> list[torch.Tensor]:
    x = spiral().requires_grad_()
    (x.conj().imag * torch.arange(4.0)).sum().backward()
    return [x.grad.resolve_conj().resolve_neg()] if x.grad is not None else []


def results_that_grow() -> list[torch.Tensor]:
    x = torch.arange(6.0).reshape(2, 3)
    values, indices = torch.empty(0), torch.empty(0, dtype=torch.int64)
    torch.sort(x.t(), descending=True, out=(values, indices))
    total = torch.empty(0)
    assert torch.sum(x, 0, out=total) is total
    assert total.shape == (3,)
    view = values.t()
    return [values, indices, total, total + 1, view + 0, torch.linalg.inv(torch.eye(2) * 2, out=torch.empty(0))]


@pytest.mark.parametrize(
    "program",
    [parts_of_conjugates, changes_through_conjugates, gradients_through_conjugates, results_that_grow],
    ids=lambda program: program.__name__,
)
def test_it_gives_what_it_gives_in_the_script(
    same_as_locally: Check, program: Callable[[], list[torch.Tensor]]
) -> None:
    same_as_locally(program)


def test_a_conjugate_is_brought_to_a_mesh_and_back(procs: ProcMesh) -> None:
    x = spiral().conj()
    there = to_mesh(x, procs)
    torch.testing.assert_close(at(there), x.resolve_conj())
    with procs.activate():
        imaginary = remote(lambda x: (x + 0).conj(), propagate=lambda x: torch.empty_like(x))(there).imag
    torch.testing.assert_close(at(imaginary), spiral().imag)


def test_conjugates_are_communicated(procs: ProcMesh) -> None:
    x = to_mesh(spiral(), procs).conj()
    expected = spiral().conj().resolve_conj()
    torch.testing.assert_close(at(x.reduce("gpus")), expected * 2)
    torch.testing.assert_close(at(x.imag.reduce("gpus")), expected.imag * 2)
    torch.testing.assert_close(at(x.all_to_all("gpus"), gpus=1), expected[[2, 3, 2, 3]])
    torch.testing.assert_close(at(x.slice_mesh(gpus=0).to_mesh(procs), gpus=1).imag, expected.imag)
    torch.testing.assert_close(at(x.slice_mesh(gpus=1)).real, expected.real)


def test_sparse_tensors_are_refused_with_words(procs: ProcMesh) -> None:
    with pytest.raises(LocalTensorError, match=r"torch.sparse_coo.*to_dense"):
        to_mesh(torch.eye(3).to_sparse(), procs)
    with procs.activate(), pytest.raises(NotPropagatableError, match=r"_to_sparse returns .* not strided"):
        torch.eye(3).to_sparse()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (torch.bincount, r"aten::bincount.*index_add_.*inspect"),
        (torch.unique, r"aten::_unique2.*propagate=\"inspect\".*inspect\(x\)"),
        (torch.unique_consecutive, r"aten::unique_consecutive.*propagate=\"inspect\""),
        (torch.nonzero, r"aten::nonzero.*nonzero_static"),
        (lambda x: x[x > 0], r"aten::index.*torch.where"),
    ],
)
def test_shapes_that_depend_on_values_are_refused_with_what_to_do(
    procs: ProcMesh, call: Callable[[torch.Tensor], Any], words: str
) -> None:
    with procs.activate():
        x = torch.arange(3)
        with pytest.raises(NotPropagatableError, match=words):
            call(x)


def test_a_storage_is_named_and_not_written_out(procs: ProcMesh) -> None:
    with procs.activate(), pytest.raises(NotPropagatableError, match="takes UntypedStorage, which") as caught:
        torch.ones(1).set_(torch.UntypedStorage(100_000), 0, (10,), (1,))
    assert len(str(caught.value)) < 200


def sums_of_products(x: torch.Tensor) -> torch.Tensor:
    """Its gradients are made with ones and zeros that torch makes from nothing."""
    return x.prod() + x.cumprod(0).sum() + x.unbind()[1]


def test_a_backward_runs_where_its_tensors_are(both: tuple[ProcMesh, ProcMesh]) -> None:
    here, there = both
    expected = torch.tensor([1.0, 0.0, 3.0], requires_grad=True)
    sums_of_products(expected).backward()
    for where in (None, here, there):
        with here.activate():
            x = torch.tensor([1.0, 0.0, 3.0], requires_grad=True)
            loss = sums_of_products(x)
        if where is None:
            loss.backward()
        else:
            with where.activate():
                loss.backward()
        assert x.grad is not None
        torch.testing.assert_close(at(x.grad), expected.grad)


def test_a_backward_over_two_meshes_makes_each_tensor_where_it_is_needed(both: tuple[ProcMesh, ProcMesh]) -> None:
    here, there = both
    with here.activate():
        x = torch.tensor([1.0, 0.0, 3.0], requires_grad=True)
        first = sums_of_products(x).reshape(1) * torch.ones(2)
    with there.activate():
        y = torch.tensor([2.0, 0.0], requires_grad=True)
        loss = (first.to_mesh(there) * y).sum() + y.prod()
    loss.backward()
    plain = torch.tensor([1.0, 0.0, 3.0], requires_grad=True)
    other = torch.tensor([2.0, 0.0], requires_grad=True)
    ((sums_of_products(plain).reshape(1) * torch.ones(2) * other).sum() + other.prod()).backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close([at(x.grad), at(y.grad)], [plain.grad, other.grad])


class Scaled(torch.autograd.Function):
    """Its backward makes a tensor from nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * torch.full((3,), 2.0)


def test_a_backward_of_the_users_makes_tensors_where_it_runs(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.ones(3, requires_grad=True)
        loss = Scaled.apply(x).sum()  # type: ignore[no-untyped-call]
    loss.backward()
    assert x.grad is not None
    assert at(x.grad, gpus=1).tolist() == [2, 2, 2]


def test_tensors_of_two_meshes_are_refused_in_a_backward_too(both: tuple[ProcMesh, ProcMesh]) -> None:
    here, there = both
    with there.activate():
        kept = torch.ones(3)
    with here.activate():
        x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda grad: grad * kept)
    with pytest.raises(MeshMismatchError, match="bring one to the mesh of the other"):
        x.sum().backward()


def test_a_mean_of_a_mesh_does_not_go_into_a_tensor_of_the_script(procs: ProcMesh) -> None:
    there = to_mesh(torch.tensor([1.0, torch.nan]), procs)
    with pytest.raises(LocalTensorError, match="cannot be mixed"):
        torch.nanmean(there, out=torch.empty(()))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("lengths", ["tensors", "lists"])
def test_ctc_loss_has_lengths_of_the_mesh_or_of_the_script(
    same_as_locally: Check, reduction: str, lengths: str
) -> None:
    def program() -> list[torch.Tensor]:
        scores = torch.sin(torch.arange(6 * 2 * 4.0)).reshape(6, 2, 4).requires_grad_()
        targets, given = torch.tensor([[1, 2, 2], [3, 1, 0]]), ([6, 5], [3, 2])
        sizes = [torch.tensor(each) for each in given] if lengths == "tensors" else list(given)
        loss = nn.functional.ctc_loss(scores.log_softmax(2), targets, *sizes, reduction=reduction)
        loss.sum().backward()
        assert scores.grad is not None
        return [loss, scores.grad]

    same_as_locally(program)


def test_lengths_that_differ_between_ranks_fail_there(procs: ProcMesh) -> None:
    with procs.activate():
        scores, targets = torch.zeros(4, 1, 3).log_softmax(2), torch.tensor([[1, 2]])
        lengths = torch.tensor([2]) - procs.rank_tensor("gpus")
        loss = nn.functional.ctc_loss(scores, targets, torch.tensor([4]), lengths)
    assert at(loss) > 0
    with pytest.raises(RemoteError, match="target_lengths of ctc_loss must be the same on all ranks"):
        at(loss, gpus=1)


def test_numbers_that_say_a_shape_are_fetched(same_as_locally: Check) -> None:
    def program() -> list[torch.Tensor]:
        x = torch.arange(8.0)
        return [
            *torch.tensor_split(x, torch.tensor([2, 3])),
            *x.tensor_split(torch.tensor(3)),
            torch.repeat_interleave(x[:3], torch.tensor([2, 0, 1])),
            x.reshape(2, 4).repeat_interleave(torch.tensor([3]), dim=0),
            torch.repeat_interleave(torch.tensor([1, 2])),
            torch.combinations(x[:4], 2),
        ]

    same_as_locally(program)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_that_is_not_compiled(procs: ProcMesh) -> None:
    local = torch.cos(torch.arange(1 * 2 * 128 * 8.0)).reshape(1, 2, 128, 8)
    there = to_mesh(local, procs)

    def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return query >= key

    def biased(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return score + (query - key) * 0.1

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        mask = create_block_mask(causal, None, None, 128, 128, device="cpu")
        found = [flex_attention(x, x, x), flex_attention(x, x, x, score_mod=biased, block_mask=mask)]
        assert all(isinstance(each, torch.Tensor) for each in found)
        return found  # type: ignore[return-value]

    expected = run(local)
    with procs.activate():
        found = run(there)
    found.append(flex_attention(there, there, there))  # type: ignore[arg-type]
    for one, other in zip(found, [*expected, expected[0]], strict=True):
        torch.testing.assert_close(at(one, gpus=1), other)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_in_a_compiled_function(procs: ProcMesh) -> None:
    there = to_mesh(torch.cos(torch.arange(1 * 2 * 128 * 8.0)).reshape(1, 2, 128, 8), procs)

    @compile
    def step(x: torch.Tensor) -> Any:
        return flex_attention(x, x, x)  # type: ignore[arg-type]

    with procs.activate():
        first, second = step(there), step(there)
    torch.testing.assert_close(at(first), at(second))
    assert step.programs == 1


COMPILING = """
import torch
from skipper.control import this_host
from skipper.tensor_engine import inspect

compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
with this_host().spawn_procs({"gpus": 1}).activate():
    for size in range(1, 5):
        x = torch.zeros(size, requires_grad=True)
        y = compiled(x)
        y.sum().backward()
        print(inspect(y.detach(), timeout=60).tolist(), inspect(x.grad, timeout=60).tolist())
"""

FAILING = """
import torch
from skipper.control import this_host

with this_host().spawn_procs({"gpus": 1}).activate():
    torch.ones(2)[torch.tensor([5])]
"""


def script(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100, check=False)


def test_torchs_compiler_runs_tensors_of_a_mesh_as_they_are_and_says_nothing() -> None:
    ended = script(COMPILING)
    assert ended.stdout.splitlines() == [f"{[1.0] * size} {[1.0] * size}" for size in range(1, 5)]
    assert (ended.stderr, ended.returncode) == ("", 0)


def test_a_failure_that_nobody_has_fetched_ends_the_script_with_1() -> None:
    ended = script(FAILING)
    assert ended.returncode == 1
    assert "index 5 is out of bounds" in ended.stderr
