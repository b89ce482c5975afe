"""`make test-gpu` where there is no GPU: what it wants, what it says is missing, and how it ends its parts."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.gpu import gates, testing, wheels
from tests.gpu.errors import GpuRunError
from tests.gpu.parts import RECORD_VARIABLE, Part, Runner
from tests.tree import ROOT

FAMILY = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""
THREE = """
import pytest
def test_good(): pass
def test_bad(): assert 1 == 2, "one is not two"
@pytest.mark.skip(reason="needs a thing")
def test_left_out(): pass
"""


def test_the_wheels_are_for_the_cuda_that_was_asked_for_and_never_torch() -> None:
    wanted = wheels.requirements("13")
    names = [line.partition(">")[0].partition("=")[0] for line in wanted]
    assert "libucx-cu13>=1.22.0" in wanted
    assert {"grpcio", "pytest", "hypothesis", "setuptools"} <= set(names)
    assert not {"torch", "numpy", "libucx-cu12"} & set(names)
    with pytest.raises(GpuRunError, match="no UCX for CUDA 11"):
        wheels.requirements("11")


def test_what_is_missing_is_said_before_anything_is_made(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu", "test", "--wheels", str(tmp_path), "--out", str(tmp_path / "out")]
    environment = {**os.environ, "CC": "no-such-compiler"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 2
    assert "a C compiler" in ran.stderr
    assert f"{tmp_path} has not one pip-*.whl" in ran.stderr
    assert "make gpu-wheels fills it" in ran.stderr


def test_a_part_that_takes_too_long_is_ended_with_its_children_and_its_output_is_kept(tmp_path: Path) -> None:
    runner = Runner(Path(sys.executable), tmp_path / "log", 60.0)
    ended = runner.run(Part("family", ["-c", FAMILY], 2.0))
    assert ended.status is None
    assert (tmp_path / "log").read_text().endswith(ended.output)
    pid = int(ended.output.split()[1])
    deadline = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is left"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_no_part_begins_when_the_time_of_all_is_over(tmp_path: Path) -> None:
    ended = Runner(Path(sys.executable), tmp_path / "log", 0.0).run(Part("late", ["-c", "print(1)"], 10.0))
    assert ended.status is None
    assert "not begun" in ended.output


def test_each_test_leaves_a_line_when_it_ends(tmp_path: Path) -> None:
    (tmp_path / "test_three.py").write_text(THREE)
    record = tmp_path / "record.jsonl"
    runner = Runner(Path(sys.executable), tmp_path / "log", 60.0)
    pytest_ = ["-m", "pytest", "-p", "tests.gpu.record", "-q", "-c", os.devnull, "--rootdir", str(tmp_path)]
    ended = runner.run(Part("three", [*pytest_, str(tmp_path / "test_three.py")], 60.0), {RECORD_VARIABLE: str(record)})
    assert ended.status == 1
    told = {line["test"].partition("::")[2]: line for line in map(json.loads, record.read_text().splitlines())}
    assert {name: line["outcome"] for name, line in told.items()} == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_left_out": "skipped",
    }
    assert "one is not two" in told["test_bad"]["why"]
    assert told["test_left_out"]["why"] == "needs a thing"


def test_files_with_tests_for_a_gpu_are_found_and_no_test_is_marked_in_another_way() -> None:
    found = testing.files()
    rooms = ("dataplane", "dataplane/backends", "tensor_engine", "torchstore")
    assert {f"tests/{room}/test_cuda.py" for room in rooms} <= set(found)
    assert found[0].startswith("tests/dataplane")
    marker = "pytest.mark." + "cuda"
    marking = [file for file in (ROOT / "tests").rglob("*.py") if marker in file.read_text("utf-8")]
    assert marking == [ROOT / "tests" / "gpu" / "gates.py"]


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a machine without a GPU: it is about what is missing there"
)
def test_the_reason_for_a_skip_is_the_first_thing_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "DRIVER", "libno-such-driver.so.1")
    gates.forget()
    assert "the driver's library cannot be loaded (libno-such-driver.so.1" in (gates.missing() or "")
    monkeypatch.setattr(gates, "DRIVER", "libc.so.6")  # one that loads
    gates.forget()
    why = gates.missing(2) or ""
    assert why == gates.missing_nccl() or torch.version.cuda
    assert torch.__version__ in why
    assert ("built without CUDA" in why) == (torch.version.cuda is None)
    monkeypatch.undo()
    gates.forget()
