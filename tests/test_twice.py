"""`tests.twice`: what it forgives, and what it does not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ONCE = """
from pathlib import Path
def test_fails_the_first_time():
    there = Path("been").exists()
    Path("been").touch()
    assert there
"""
_ALWAYS = "def test_fails(): assert 0"
_PASSES = "def test_passes(): pass"
_CUT = "import os\ndef test_ends_the_process(): os._exit(1)"
_MANY = "import pytest\n@pytest.mark.parametrize('n', range(13))\n" + _ONCE.replace(
    "the_first_time()", "thirteen(n)"
).replace('"been"', 'f"been{n}"')


@pytest.mark.parametrize(
    ("files", "passes", "runs"),
    [
        ({"a": _PASSES}, True, 1),
        ({"a": _PASSES, "b": _ONCE}, True, 2),
        ({"a": _ALWAYS, "b": _ONCE}, False, 2),
        ({"a": _MANY}, False, 1),
        ({"a": _CUT, "b": _ONCE}, False, 1),
        ({"a": "import nothing_of_this_name", "b": _PASSES}, False, 1),
    ],
)
def test_only_a_few_tests_that_pass_by_themselves_are_forgiven(
    files: dict[str, str], passes: bool, runs: int, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    ended = subprocess.run(
        [sys.executable, "-m", "tests.twice", "--numprocesses=2", "--dist=loadfile", "--max-worker-restart=0", "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode == 0) is passes, ended.stdout
    assert ended.stdout.count("test session starts") == runs, ended.stdout
    assert ("to be mended" in ended.stdout) is (passes and runs == 2)
