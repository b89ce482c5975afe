"""The checkpoint example on files as people have them: odd shapes, many dtypes, one file or several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from examples.checkpoint.files import INDEX, Checkpoint, CheckpointError
from tests.integration.example_process import run

EXAMPLE = ("-m", "examples.sync_checkpoint")


def odd_tensors() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    first = {
        "embedding.weight": torch.randn(97, 33).bfloat16(),
        "scale": torch.tensor(3.5),
        "steps": torch.tensor(7, dtype=torch.int64),
        "nothing": torch.empty(0, 4),
        "mask": torch.randn(3, 3) > 0,
    }
    second = {
        "conv.weight": torch.randn(5, 3, 2, 2).half(),
        "bias": torch.randn(11, dtype=torch.float64),
        "one_row": torch.randn(1, 301),
        "one_column": torch.randn(301, 1),
        "quantised": torch.randn(9, 4).to(torch.float8_e4m3fn),
        "phases": torch.randn(4, 3, dtype=torch.complex64),
        "bytes": torch.arange(13, dtype=torch.uint8).view(1, 13),
    }
    return first, second


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    first, second = odd_tensors()
    save_file(first, tmp_path / "part-1.safetensors")
    save_file(second, tmp_path / "part-2.safetensors")
    return tmp_path


@pytest.mark.parametrize(("layout", "trainers", "generators"), [("columns", 3, 2), ("grid", 2, 4)])
def test_every_tensor_arrives_bit_for_bit(folder: Path, layout: str, trainers: int, generators: int) -> None:
    sizes = ("--trainers", str(trainers), "--generators", str(generators), "--layout", layout)
    example = run(*EXAMPLE, str(folder), *sizes, "--iters", "2", "--json", "-")
    assert example.process.returncode == 0, example.stderr
    report = json.loads(example.stdout)
    assert report["mismatched_tensors"] == 0
    assert report["errors"] == []
    assert report["config"] == {
        "trainers": trainers,
        "generators": generators,
        "layout": layout,
        "iters": 2,
        "timeout": 300.0,
    }
    rows = {row["name"]: row for row in report["results"]}
    assert {"sync_s", "sync_gb_per_s", "first_sync_s", "load_s"} <= rows.keys()
    assert rows["sync_s"]["n"] == 2
    assert rows["sync_s"]["tensors"] == 12
    whole = sum(tensor.nbytes for part in odd_tensors() for tensor in part.values())
    assert whole <= rows["sync_s"]["nbytes"] <= generators * whole


def test_the_script_runs_by_its_path_on_a_single_file(tmp_path: Path) -> None:
    save_file({"weight": torch.randn(64, 48)}, tmp_path / "model.safetensors")
    file = str(tmp_path / "model.safetensors")
    example = run("examples/sync_checkpoint.py", file, "--layout", "rows", "--generators", "1", "--iters", "1")
    assert example.process.returncode == 0, example.stderr
    assert "all equal to the files" in example.stdout


@pytest.mark.parametrize("what", ["missing", "empty", "damaged"])
def test_a_folder_without_a_checkpoint_is_refused_before_anything_starts(what: str, tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    if what != "missing":
        target.mkdir()
    if what == "damaged":
        (target / "model.safetensors").write_bytes(b"no header")
    example = run(*EXAMPLE, str(target))
    assert example.process.returncode == 2
    assert str(target) in example.stderr
    assert "Traceback" not in example.stderr


def test_an_index_decides_which_file_a_tensor_comes_from(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "old.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "new.safetensors")
    index = {"weight_map": {"a": "new.safetensors", "b": "old.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.shapes == {"a": (2,), "b": (2,)}
    assert checkpoint.read({"a": [slice(1, 2)]})["a"].tolist() == [1.0]


def test_an_index_that_promises_more_than_there_is_is_an_error(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "part.safetensors")
    index = {"weight_map": {"a": "part.safetensors", "b": "part.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"not there.*'b'"):
        Checkpoint(tmp_path)


def test_a_name_in_two_files_without_an_index_is_an_error(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"'a' is in one\.safetensors and in two\.safetensors"):
        Checkpoint(tmp_path)
