"""The tables of `docs/reference/from_monarch.md` say what the two libraries do; see `contracts`."""

import contextlib
import importlib
import json
import os
import pkgutil
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PEER = ROOT / ".cache" / "peers" / "monarch" / "bin" / "python"
"""Made by the benchmarks beside the peers."""
VARIABLE = "SKIPPER_TEST_MONARCH"
"""Names the Python of another environment where Monarch is installed."""

LOOKING_S = 240.0
_MARK = "CONTRACTS "


def looked_at(python: str, side: str) -> dict[str, dict[str, str] | list[str]]:
    """What one of the libraries does, in a process group that is gone after that."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT) if side == "skipper" else ""}
    with subprocess.Popen(
        [python, str(Path(__file__).with_name("contracts.py")), side],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=LOOKING_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    found = [line.removeprefix(_MARK) for line in out.splitlines() if line.startswith(_MARK)]
    assert found, f"{side} said nothing: {out[-2000:]}{err[-2000:]}"
    result: dict[str, dict[str, str] | list[str]] = json.loads(found[0])
    return result


def table(heading: str, page: str = "from_monarch.md") -> list[list[str]]:
    """The rows of the first table below a heading."""
    _, _, below = (ROOT / "docs" / "reference" / page).read_text().partition(f"### {heading}\n")
    lines = [line for line in below.partition("\n#")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


CONTRACTS = "Contracts that differ"
NAMES = "Names of `monarch.actor` and `monarch.rdma` that are not here"


def test_the_table_says_what_this_library_does_and_why() -> None:
    rows = table(CONTRACTS)
    assert {title: here for title, _, here, _ in rows} == looked_at(sys.executable, "skipper")["rows"]
    assert all(there != here or "both" in why for _, there, here, why in rows)
    assert all(why for *_, why in rows)


def test_the_table_says_what_monarch_does_and_which_names_are_not_here() -> None:
    python = os.environ.get(VARIABLE) or (str(PEER) if PEER.exists() else "")
    if not python:
        pytest.skip(f"torchmonarch is not installed: {PEER} is made by the benchmarks, or name a Python by {VARIABLE}")
    seen = looked_at(python, "monarch")
    assert {title: there for title, there, _, _ in table(CONTRACTS)} == seen["rows"]
    ours = {
        name for module in ("skipper.control", "skipper.dataplane") for name in importlib.import_module(module).__all__
    }
    assert named() == set(seen["names"]) - ours


def test_names_that_are_not_here_are_not() -> None:
    ours = {
        name for module in ("skipper.control", "skipper.dataplane") for name in importlib.import_module(module).__all__
    }
    assert not named() & ours


def named() -> set[str]:
    """The names in the table of those that are not here."""
    return {name for row in table(NAMES) for name in re.findall(r"`(\w+)`", row[0])}


def test_names_of_torchstore_that_are_the_same_are_there() -> None:
    rows = [row for row in table("Names of `torchstore`", "from_torchstore.md") if row[1] == "the same"]
    names = [name for there, *_ in rows for name in re.findall(r"`([\w.]+)`", there) if not name.startswith("get_v")]
    assert len(names) > 30
    for name in names:
        if name != "get_client_id":
            assert pkgutil.resolve_name(f"skipper.torchstore.{name}") is not None
