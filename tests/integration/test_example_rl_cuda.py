"""The main job with its policy on a GPU: weights go from the trainer's GPU memory into the generators' own."""

import json
from pathlib import Path

from tests.gpu.gates import needs_nccl, on_gpus
from tests.integration.example_process import run

pytestmark = needs_nccl()

RL = ("-m", "examples.rl_weight_sync", "--device", "cuda")


def verified(tmp_path: Path, *options: str) -> None:
    example = run(*RL, *options, "--verify", "--json", "-", "--png", str(tmp_path / "curves.png"))
    assert example.process.returncode == 0, example.stderr
    report = json.loads(example.stdout)
    assert report["mismatched_tensors"] == 0
    assert report["compared_tensors"] > 0
    assert report["config"]["device"] == "cuda"


def test_three_verified_steps_on_one_gpu(tmp_path: Path) -> None:
    verified(tmp_path, "--steps", "3", "--trainers", "1", "--generators", "1")


def test_a_killed_generator_is_replaced_and_reads_again(tmp_path: Path) -> None:
    verified(tmp_path, "--steps", "4", "--trainers", "1", "--generators", "1", "--kill-at", "2")


@on_gpus(2)
def test_sharded_trainers_and_generators(tmp_path: Path) -> None:
    verified(tmp_path, "--steps", "3")
