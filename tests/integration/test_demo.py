"""The main job, run as its user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(400)
def test_demo_reaches_its_reward_and_leaves_its_report(tmp_path: Path) -> None:
    """`make demo` exits 0 only when the mean reward passed 0.9; it prints its table and draws its picture.

    What follows it, a sync of a model of 1 GB, has a test of its own in `test_example_rl`.
    """
    picture = tmp_path / "rl_weight_sync.png"
    done = subprocess.run(
        ["make", "demo", f"ARGS=--png {picture} --no-large-sync"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "staleness" in done.stdout
    assert "What this means:" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
