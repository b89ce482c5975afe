"""The example of FSDP2, a pipeline and tensor parallelism, run as its user runs it."""

from __future__ import annotations

import pytest

from examples.parallel_weight_sync import main
from tests.integration.example_process import run


def test_stages_and_shards_become_tensor_parallel_ranks_bit_for_bit() -> None:
    example = run("-m", "examples.parallel_weight_sync", "--steps", "1", timeout=100.0)
    assert example.process.returncode == 0, example.stdout + example.stderr
    assert "2 stages x 2 FSDP2 ranks → 2 tensor-parallel ranks" in example.stdout
    assert "bits: all equal to what DTensor gathers" in example.stdout
    assert "4 of 4" in example.stdout  # the second version replays the plans of the first


@pytest.mark.parametrize("options", [("--stages", "5"), ("--shards", "0"), ("--generators", "3")])
def test_sizes_that_make_no_sense_are_refused(options: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(options)
    assert options[0] in capsys.readouterr().err
