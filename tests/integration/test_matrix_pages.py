"""The pages of what works where name what there is: each backend, Python, extra and lower bound, and nothing else."""

import re
import tomllib
from pathlib import Path
from typing import Any

from skipper import dataplane

ROOT = Path(__file__).resolve().parents[2]
LIMITS = ROOT / "docs" / "reference" / "limits.md"
INSTALL = ROOT / "docs" / "install.md"
UPGRADE = ROOT / "docs" / "upgrade_0_2.md"
CHOOSE = ROOT / "docs" / "choose.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
MARKS = ("tested", "in software", "not tried", "no")
OF_A_CHECKOUT = {"dev", "docs", "test"}
"""Extras that are for those who work on Skipper."""


def section(page: Path, heading: str) -> str:
    """The text below a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page.name} has no {heading!r}"
    return found[1]


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table, without the line below its head."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for n, line in enumerate(block.splitlines()) if n != 1]
        for block in blocks
    ]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def backends() -> list[str]:
    return [status.name for status in dataplane.backends()]


def test_each_backend_has_a_column_for_each_host() -> None:
    here, there, needs = tables(section(LIMITS, "Backends and memory"))
    between = [name for name in backends() if name != "local"]
    for table in (here, there):
        assert sorted({name for cell in table[0][1:] for name in quoted(cell)}) == sorted(between)
    assert sorted({quoted(row[0])[0] for row in needs[1:]}) == sorted(between)
    (operations,) = tables(section(LIMITS, "Operations"))
    assert sorted(quoted(cell)[0] for cell in operations[0][1:]) == sorted(backends())


def test_each_cell_of_memory_is_a_mark_that_the_page_explains() -> None:
    (marks,) = tables(section(LIMITS, "How to read the tables"))
    assert [row[0] for row in marks[1:]] == list(MARKS)
    here, there, _ = tables(section(LIMITS, "Backends and memory"))
    for row in [*here[1:], *there[1:]]:
        assert all(re.match(rf"({'|'.join(MARKS)})\b", cell) for cell in row[1:]), row


def test_each_python_has_a_row() -> None:
    found = [each.rpartition(" ")[2] for each in project()["classifiers"] if re.search(r":: 3\.\d+$", each)]
    python, hardware = tables(section(INSTALL, "What was tested"))
    assert [row[0] for row in python[1:] if row[0].startswith("Python")] == [f"Python {each}" for each in found]
    assert {name for row in hardware for name in quoted(row[0])} == {"cu12", "cu13"}


def test_each_extra_is_explained() -> None:
    ucx, others = tables(section(INSTALL, "Which UCX"))[0], tables(section(INSTALL, "Other extras"))[0]
    named = [name for table in (ucx, others) for row in table[1:] for name in quoted(row[0])]
    assert sorted(named) == sorted(project()["optional-dependencies"].keys() - OF_A_CHECKOUT)


def test_the_lower_bounds_are_those_of_the_project() -> None:
    bounds = dict(re.findall(r"^(\w+)>=([\d.]+)", "\n".join(project()["dependencies"]), re.MULTILINE))
    (row,) = [row for row in tables(section(UPGRADE, "Installing"))[0] if row[0].startswith("lower bounds")]
    named = re.findall(r"(\w+) (\d[\d.]*\d)", row[0])
    told = {name.lower().replace("pytorch", "torch"): bound for name, bound in named}
    assert told == {name: bounds[name] for name in ("torch", "grpcio", "protobuf", "numpy")}
    assert f"| PyTorch | {bounds['torch']} or newer." in INSTALL.read_text()


def test_the_figures_of_the_comparison_are_those_of_the_last_report() -> None:
    figures = section(CHOOSE, "The figures")
    (named,) = re.findall(r"\((\.\./benchmarks/results/[^)]+\.md)\)", figures)
    assert f"The last run: [{Path(named).stem}]" in PERFORMANCE.read_text()
    report = (CHOOSE.parent / named).resolve().read_text()
    measured = {cell.partition("<br>")[0] for table in tables(report) for row in table for cell in row}
    (shown,) = tables(figures)
    told = [cell.strip("*") for row in shown[1:] for cell in row[1:] if cell]
    assert len(told) > 20
    assert [figure for figure in told if figure not in measured] == []
