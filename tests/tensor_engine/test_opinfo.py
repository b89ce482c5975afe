"""A part of `opinfo`; ``python -m tests.tensor_engine.opinfo`` tries every operation that torch has."""

import subprocess
import sys

import pytest

KNOWN = [
    "combinations",
    "fft.hfft",
    "index_fill",
    "index_put",
    "linalg.inv",
    "linalg.lstsq",
    "linalg.matrix_rank",
    "matmul",
    "msort",
    "nanmean",
    "nonzero",
    "prod",
    "sgn",
    "nn.functional.ctc_loss",
    "repeat_interleave",
    "sparse.mm.reduce",
    "tensor_split",
]
"""Operations that have been mended once, and some that are refused."""


@pytest.mark.parametrize(
    "chosen", [["--spread", "48", "--samples", "2"], ["--ops", *KNOWN, "--samples", "4"]], ids=["spread", "known"]
)
def test_operations_of_torch_give_on_a_mesh_what_they_give_in_the_script(chosen: list[str]) -> None:
    # In a process of its own: torch's database of operations changes settings of the process that has it.
    command = [sys.executable, "-m", "tests.tensor_engine.opinfo", *chosen]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "\nhung         0" in ended.stdout
