"""`torch.library`: operations that the script defines run on workers, which get their functions."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from skipper.control import ProcMesh
from skipper.tensor_engine import NotPropagatableError, RemoteError, inspect, remote
from skipper.tensor_engine.script.by_value import definition_of
from tests.tensor_engine import user_functions
from tests.tensor_engine.conftest import PATIENCE_S


@pytest.fixture
def tripled() -> Iterator[Callable[[Tensor], Tensor]]:
    """An operation of a function within a function: workers cannot import it. It uses another one."""

    @torch.library.custom_op("skipper_tests::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * 2)

    @torch.library.custom_op("skipper_tests::tripled", mutates_args=())
    def tripled(x: Tensor) -> Tensor:
        return doubled(x) + x

    doubled.register_fake(torch.empty_like)
    tripled.register_fake(torch.empty_like)
    tripled.register_autograd(lambda ctx, grad: grad * 3)
    yield tripled
    for each in (doubled, tripled):
        each._lib._destroy()


def at(tensor: torch.Tensor, rank: int = 1) -> Any:
    return inspect(tensor.detach(), gpus=rank, timeout=PATIENCE_S).tolist()


def test_an_operation_of_the_script_runs_on_workers_with_its_gradient(
    procs: ProcMesh, tripled: Callable[[Tensor], Tensor]
) -> None:
    with procs.activate():
        x = torch.arange(3.0, requires_grad=True)
        y = tripled(x)
    y.sum().backward()
    assert x.grad is not None
    assert [at(y), at(x.grad)] == [[0, 3, 6], [3, 3, 3]]


def test_a_remote_function_uses_one(procs: ProcMesh, tripled: Callable[[Tensor], Tensor]) -> None:
    with procs.activate():
        x = torch.ones(2)
    assert at(remote(lambda x: tripled(x), propagate=torch.empty_like)(x)) == [3, 3]


def test_workers_import_the_module_that_defines_one(procs: ProcMesh) -> None:
    assert definition_of(user_functions.halved._opoverload) == "tests.tensor_engine.user_functions"
    with procs.activate():
        assert at(user_functions.halved(torch.ones(2))) == [0.5, 0.5]


def test_one_that_changes_its_arguments(procs: ProcMesh) -> None:
    @torch.library.custom_op("skipper_tests::added_", mutates_args=("x",))
    def added_(x: Tensor, number: float, times: int = 1) -> None:
        x += number * times

    with procs.activate():
        x = torch.zeros(2, 2)
        added_(x[0], 1.5)
        added_(x[0], 2.5, times=2)
    assert at(x) == [[6.5, 6.5], [0, 0]]


def test_the_kernel_of_a_device_is_the_one_that_runs(procs: ProcMesh) -> None:
    @torch.library.custom_op("skipper_tests::where", mutates_args=())
    def where(x: Tensor) -> Tensor:
        return x + 1

    where.register_fake(torch.empty_like)
    where.register_kernel("cpu")(lambda x: x + 2)
    with procs.activate():
        assert at(where(torch.zeros(1))) == [2]


def test_a_second_definition_takes_the_place_of_the_first_as_in_a_cell_that_runs_again(procs: ProcMesh) -> None:
    for factor in (2.0, 5.0):

        @torch.library.custom_op("skipper_tests::times", mutates_args=())
        def times(x: Tensor, factor: float = factor) -> Tensor:
            return x * factor

        times.register_fake(lambda x, factor=factor: torch.empty_like(x))
        with procs.activate():
            assert at(times(torch.ones(1))) == [factor]


def test_without_shapes_it_is_refused_with_words(procs: ProcMesh) -> None:
    @torch.library.custom_op("skipper_tests::shapeless", mutates_args=())
    def shapeless(x: Tensor) -> Tensor:
        return x[x > 0]

    with (
        procs.activate(),
        pytest.raises(NotPropagatableError, match=r"skipper_tests::shapeless.*register_fake.*remote"),
    ):
        shapeless(torch.ones(1))


def test_one_that_workers_cannot_know_is_refused_with_words(procs: ProcMesh) -> None:
    with torch.library._scoped_library("skipper_tests_low", "DEF") as library:
        library.define("plus(Tensor x) -> Tensor")
        library.impl("plus", lambda x: x + 1, "CompositeExplicitAutograd")
        torch.library.register_fake("skipper_tests_low::plus", torch.empty_like, lib=library)
        with procs.activate():
            y = torch.ops.skipper_tests_low.plus(torch.ones(1))
        with pytest.raises(RemoteError, match=r"skipper_tests_low::plus.*remote\(.*custom_op"):
            inspect(y, timeout=PATIENCE_S)


def test_what_cannot_be_pickled_is_refused_where_it_is_used(procs: ProcMesh) -> None:
    file = sys.stderr

    @torch.library.custom_op("skipper_tests::logged", mutates_args=())
    def logged(x: Tensor) -> Tensor:
        file.write("here")
        return x.clone()

    logged.register_fake(torch.empty_like)
    with procs.activate(), pytest.raises(TypeError, match=r"skipper_tests::logged cannot be pickled"):
        logged(torch.ones(1))


SCRIPT = """
import torch
from skipper.control import this_host
from skipper.tensor_engine import inspect

@torch.library.custom_op("script::plus", mutates_args=())
def plus(x: torch.Tensor, number: float) -> torch.Tensor:
    return x + number

@plus.register_fake
def _(x, number):
    return torch.empty_like(x)

if __name__ == "__main__":
    with this_host().spawn_procs({"gpus": 1}).activate():
        print(inspect(plus(torch.ones(2), 2.0), timeout=60).tolist())
"""


def test_a_script_defines_one(tmp_path: Any) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    ended = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.stdout, ended.returncode) == ("[3.0, 3.0]\n", 0), ended.stderr
