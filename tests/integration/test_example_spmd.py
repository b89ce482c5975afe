"""A plain DDP script: started by torchrun, and on a mesh of processes that stay."""

from __future__ import annotations

from pathlib import Path

from tests.integration.example_process import run


def losses(output: str) -> list[str]:
    """What rank 0 has printed, without the name that a script's output has before it."""
    return [line[line.index("step ") :] for line in output.splitlines() if "step " in line and "loss" in line]


def test_the_script_trains_on_a_mesh_as_it_does_under_torchrun_and_goes_on_in_the_same_processes(
    tmp_path: Path,
) -> None:
    example = run("examples/spmd_training.py", timeout=90.0)
    assert example.process.returncode == 0, example.stderr
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--log-dir", str(tmp_path))
    reference = run(*torchrun, "examples/plain_ddp.py", timeout=90.0)
    assert reference.process.returncode == 0, reference.stderr
    printed = losses(example.stdout)
    assert len(printed) == 4
    assert printed[:2] == losses(reference.stdout)
    assert float(printed[3].rpartition(" ")[2]) < float(printed[1].rpartition(" ")[2])
    assert "2 ranks at rate 0.02" in example.stdout
