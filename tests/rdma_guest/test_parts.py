"""How the parts are run, with a program in place of the guest that says what a kernel said before it hung."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.rdma_guest import parts

SPOKEN = "tests/a.py::test_one PASSED\ntests/a.py::test_two[b] "


@pytest.fixture
def guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Whose kernel stops always in the part `bad`, and in `unlucky` the first time."""
    program = tmp_path / "guest"
    program.write_text(
        f'#!/bin/bash\nprintf %s "{SPOKEN}"\necho "$CI"\n'
        f"[[ ${{!#}} != bad ]] || exit {parts.OUT_OF_TIME}\n"
        f'[[ ${{!#}} != unlucky ]] || mkdir "{tmp_path}/again" || exit 0\n'
        f"[[ ${{!#}} != unlucky ]] || exit {parts.OUT_OF_TIME}\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(parts, "GUEST", program)
    monkeypatch.setitem(os.environ, "CI", "whole diffs")
    return program


@pytest.mark.usefixtures("guest")
def test_a_part_that_hangs_fails_all_and_its_last_test_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["parts", "good", "bad", "--", "-x"])
    assert parts.main() == 1
    shown = capsys.readouterr().out
    assert "bad took longer than 420 s, 2 times; the last test was tests/a.py::test_two[b]" in shown
    assert "1 of 2 parts passed" in shown
    assert "whole diffs" not in shown


@pytest.mark.usefixtures("guest")
def test_a_kernel_that_stops_is_told_and_its_part_gets_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["parts", "good", "unlucky"])
    assert parts.main() == 0
    assert "unlucky: the kernel has stopped at tests/a.py::test_two[b]; begun again" in capsys.readouterr().out


@pytest.mark.usefixtures("guest")
def test_parts_that_pass_are_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["parts", "good", "--"])
    assert parts.main() == 0


def test_every_file_that_needs_a_device_is_in_one_part() -> None:
    chosen = [path for part in parts.parts() for path in part]
    assert len(chosen) == len(set(chosen))
    folder = Path(parts.__file__).parent
    wants = re.compile(r"^from .* import .*needs_device", re.MULTILINE)
    needing = [file for file in folder.glob("test_*.py") if wants.search(file.read_text("utf-8"))]
    assert len(needing) > 5
    assert {str(file.relative_to(parts.ROOT)) for file in needing} <= set(chosen)
