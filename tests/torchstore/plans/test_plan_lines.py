"""The file of a plan."""

import json
from pathlib import Path
from typing import Any

import pytest

from skipper import torchstore as ts
from tests.torchstore.plans.engine import EngineModel, checkpoint_shapes

HEAD = {"format": "skipper.load_plan", "version": 1}
PARAMETER = {"parameter": "w", "dtype": "float32", "shape": [8, 6]}
TENSOR = {"checkpoint": "a", "dtype": "float32", "shape": [4, 6]}
OUT_OF_IT = {"at": {"offset": 30, "strides": [6, 1]}, "shape": [4, 6]}
OVERLAPPING = {"at": {"offset": 0, "strides": [1, 1]}, "shape": [4, 6]}
COPY = {"copy": "a", "from": "[0:4, 0:6]", "into": "w", "at": "[0:4, 0:6]"}


def test_a_plan_comes_back_from_its_file_and_the_file_is_the_same_each_time(tmp_path: Path) -> None:
    plan = ts.record_plan(EngineModel(1, 2, quantize=True), checkpoint_shapes())
    path, again = tmp_path / "plan.jsonl", tmp_path / "again.jsonl"
    plan.save(path)
    found = ts.LoadPlan.load(path)
    assert found == plan
    assert found.nbytes == plan.nbytes
    found.save(again)
    assert again.read_bytes() == path.read_bytes()
    anew = ts.record_plan(EngineModel(1, 2, quantize=True), checkpoint_shapes())
    anew.save(again)
    assert again.read_bytes() == path.read_bytes()


def test_plans_of_two_ranks_differ_in_the_lines_that_are_about_their_shards(tmp_path: Path) -> None:
    lines = []
    for rank in (0, 1):
        ts.record_plan(EngineModel(rank, 2), checkpoint_shapes()).save(tmp_path / "plan.jsonl")
        lines.append((tmp_path / "plan.jsonl").read_text().splitlines())
    gate = 'gate_proj.weight", "from": "[{}, 0:64]", "into": "gate_up_0", "at": "[0:48, 0:64]"'
    assert any(gate.format("0:48") in line for line in lines[0])
    assert any(gate.format("48:96") in line for line in lines[1])
    shared = set(lines[0]) & set(lines[1])
    assert any('"router_0"' in line and '"copy"' in line for line in shared)


@pytest.mark.parametrize(
    ("lines", "number", "reason"),
    [
        ([], 1, "does not begin with"),
        ([HEAD | {"version": 2}], 1, "does not begin with"),
        ([HEAD, {"paste": "a"}], 2, "not a line of a plan"),
        ([HEAD, PARAMETER, PARAMETER], 3, "not a line of a plan"),
        ([HEAD, PARAMETER | {"dtype": "float33"}], 2, "no dtype 'float33'"),
        ([HEAD, PARAMETER | {"shape": [-1, 6]}], 2, "whole numbers"),
        ([HEAD, PARAMETER | {"strides": [0, 1]}], 2, "stride above 0"),
        ([HEAD, PARAMETER, COPY], 3, "'a' is missing"),
        ([HEAD, PARAMETER, TENSOR, COPY | {"at": "[0:4, 0:7]"}], 4, "reaches out of"),
        ([HEAD, PARAMETER, TENSOR, COPY | {"at": "[5:9, 0:6]"}], 4, "reaches out of"),
        ([HEAD, PARAMETER, TENSOR, COPY | {"at": "[0:3, 0:6]"}], 4, "has the shape"),
        ([HEAD, PARAMETER, TENSOR, COPY | {"at": "0:4"}], 4, "not a box"),
        ([HEAD, PARAMETER, TENSOR, COPY | {"axes": [1, 1]}], 4, "axes"),
        ([HEAD, PARAMETER, TENSOR, COPY | {"casts": ["bfloat16"]}], 4, "without a cast"),
        (
            [HEAD, PARAMETER, TENSOR, COPY | OUT_OF_IT],
            4,
            "reaches out",
        ),
        (
            [HEAD, PARAMETER, TENSOR, COPY | OVERLAPPING],
            4,
            "in one place",
        ),
    ],
)
def test_what_is_no_plan_is_refused_with_the_line(
    lines: list[dict[str, Any]], number: int, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ts.LoadPlanFormatError, match=reason) as caught:
        ts.LoadPlan.load(path)
    assert caught.value.line == number
    assert str(path) in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ts.LoadPlanFormatError):
        ts.LoadPlan.load(tmp_path / "plan.jsonl")
