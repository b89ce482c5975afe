"""Training over the engine gives the losses that it gives elsewhere."""

import pytest

from skipper.control import ProcMesh
from tests.integration.example_process import run

from .transformer_ddp import BLOCK, Config, compare


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_transformer_learns_as_it_does_under_distributed_data_parallel(procs: ProcMesh, compiled: bool) -> None:
    steps = BLOCK + 1
    result = compare(procs, Config(width=16, heads=2, length=8, batch=2), steps, compiled=compiled)
    assert [len(losses) for losses in result.reference + result.engine] == [steps] * 4
    assert result.difference < 1e-5
    for losses in result.engine:
        assert losses[-1] < losses[0]


def test_the_example_trains_data_parallel_and_pipelined_as_in_one_process() -> None:
    example = run("examples/tensor_engine_mlp.py", "--steps", "3", timeout=60.0)
    assert example.process.returncode == 0, example.stderr
    header, *steps, difference = example.stdout.splitlines()[-5:]  # before them speaks gloo of PyTorch 2.8
    assert header.split() == ["step", "data-parallel", "pipeline", "one", "process"]
    assert [line.split()[0] for line in steps] == ["0", "1", "2"]
    assert float(difference.removeprefix("largest difference: ")) < 1e-5
    assert example.stderr == ""
