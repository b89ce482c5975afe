"""A short soak in every run of the tests; `python -m tests.soak` is the long one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.soak.pattern import content, described

ROOT = Path(__file__).resolve().parents[2]


def soak(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.soak", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=110, check=False)
    return done.returncode, json.loads(done.stdout)


def test_a_short_soak_finds_nothing_wrong() -> None:
    status, summary = soak("--operations", "4000", "--seconds-limit", "40")
    assert summary["wrong"] == []
    assert status == 0
    assert summary["ok"]
    assert summary["faults"]["drop"] > 0
    for lane in ("local", "shm", "ucx-cma", "ucx-tcp"):
        assert summary["outcomes"][f"{lane} read"]["succeeds"] > 0
        assert summary["outcomes"][f"{lane} write"]["succeeds"] > 0
    assert summary["swept"] > 100


def test_a_bit_that_was_flipped_is_found() -> None:
    status, summary = soak("--operations", "500", "--seconds-limit", "40", "--corrupt")
    assert status == 1
    assert not summary["ok"]
    assert any("bytes are wrong" in line for line in summary["wrong"])


def test_a_stale_byte_is_told_from_a_foreign_one() -> None:
    wanted = content(7, 2, 100, 200)
    for found, origin in ((content(7, 1, 100, 200), "those of version 1"), (content(8, 2, 100, 200), "of no version")):
        mixed = wanted.copy()
        mixed[30:60] = found[30:60]
        assert origin in described(7, 3, 100, wanted, mixed)
        assert "from byte 13" in described(7, 3, 100, wanted, mixed)


@pytest.mark.parametrize(("begin", "end"), [(0, 8), (3, 5), (7, 9), (1, 64), (4096, 4099)])
def test_parts_of_a_content_are_parts_of_the_whole(begin: int, end: int) -> None:
    assert (content(3, 1, begin, end) == content(3, 1, 0, 5000)[begin:end]).all()
