"""The table of faults says what the records say, and a run that says otherwise fails."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skipper.dataplane import OwnerDiedError, TransferTimeoutError
from tests.conformance import fault_table
from tests.conformance.fault_table import BEGIN, END
from tests.conformance.records import Fault, Recorder

ROOT = Path(__file__).resolve().parents[2]


def record(fault: Fault, backend: str, outcome: str, seconds: float, deadline_s: float | None = None) -> dict[str, Any]:
    return {"fault": fault.name, "backend": backend, "outcome": outcome, "seconds": seconds, "deadline_s": deadline_s}


RECORDS = [
    record(Fault.DROPPED, "shm", "BufferDroppedError", 0.0004),
    record(Fault.DROPPED, "shm", "BufferDroppedError", 0.0042),
    record(Fault.FROZEN_BEFORE_READ, "shm", "succeeds", 0.02, 0.3),
    record(Fault.FROZEN_BEFORE_READ, "ucx-tcp", "TransferTimeoutError", 0.34, 0.3),
    record(Fault.KILLED_BEFORE, "ucx-tcp", "OwnerDiedError", 0.06),
    record(Fault.KILLED_BEFORE, "ucx-tcp", "TransferError", 2.5),
]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(f"before\n\n{BEGIN}\n{END}\n\nafter\n")
    return path


def tool(page: Path, records: list[dict[str, Any]], does: str) -> "subprocess.CompletedProcess[str]":
    file = page.with_suffix(".jsonl")
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    command = [sys.executable, "-m", "tests.conformance.fault_table", str(file), does, str(page)]
    return subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60, check=False)


def test_every_cell_has_its_outcomes_with_the_longest_time(page: Path) -> None:
    assert tool(page, RECORDS, "--write").returncode == 0
    assert page.read_text() == (
        f"before\n\n{BEGIN}\n"
        "| fault | shm | ucx, TCP, same host |\n"
        "|---|---|---|\n"
        f"| {Fault.DROPPED.value} | `BufferDroppedError`, < 10 ms | – |\n"  # noqa: RUF001 - the page's own dash
        f"| {Fault.KILLED_BEFORE.value} | – | `OwnerDiedError`, < 100 ms or `TransferError`, < 5 s |\n"  # noqa: RUF001
        f"| {Fault.FROZEN_BEFORE_READ.value} | succeeds, < 100 ms | `TransferTimeoutError`, at the deadline |\n"
        f"{END}\n\nafter\n"
    )


def test_other_times_are_no_difference_and_other_errors_are(page: Path) -> None:
    assert tool(page, RECORDS, "--write").returncode == 0
    slower = [{**one, "seconds": one["seconds"] * 3} for one in RECORDS]
    assert tool(page, slower, "--check").returncode == 0
    other = [*RECORDS[1:], record(Fault.DROPPED, "shm", "OwnerDiedError", 0.001)]
    done = tool(page, other, "--check")
    assert done.returncode == 1
    assert "OwnerDiedError" in done.stderr
    assert Fault.DROPPED.value in done.stderr


def test_what_no_record_shows_any_more_is_a_difference(page: Path) -> None:
    assert tool(page, RECORDS, "--write").returncode == 0
    done = tool(page, RECORDS[:-2], "--check")
    assert done.returncode == 1
    assert "no record shows it" in done.stderr


def test_a_run_that_contradicts_the_page_fails_at_once(page: Path) -> None:
    tool(page, RECORDS, "--write")
    provoke = Recorder(None, fault_table.committed(page))
    with pytest.raises(TransferTimeoutError), provoke(Fault.FROZEN_BEFORE_READ, "ucx-tcp"):
        raise TransferTimeoutError("as the page says")
    with pytest.raises(AssertionError, match="TransferTimeoutError"), provoke(Fault.FROZEN_BEFORE_READ, "ucx-tcp"):
        raise OwnerDiedError("what the page does not say")
    with pytest.raises(AssertionError, match="succeeds"), provoke(Fault.DROPPED, "shm"):
        pass


def test_the_committed_page_has_known_faults_only() -> None:
    labels = {label for label, _ in fault_table.committed().cells}
    assert labels
    assert labels <= {fault.value for fault in Fault}
