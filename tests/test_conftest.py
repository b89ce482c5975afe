"""What `tests.conftest` does for every test."""

import os
import subprocess
import sys
from pathlib import Path

_FAILS = """
import ast, gc

def test_fails():
    gc.callbacks.append(lambda phase, info: ast.parse("0"))
    gc.set_threshold(1)
    assert 0
"""


def test_a_failure_is_told_where_what_is_collected_meanwhile_parses_too(tmp_path: Path) -> None:
    (tmp_path / "test_once.py").write_text(_FAILS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
    )
    assert "1 failed" in ended.stdout, ended.stdout
    assert "INTERNALERROR" not in ended.stdout
