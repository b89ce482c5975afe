"""Every tutorial is a program in `examples/`: its page shows it line by line, and shows what it prints."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.example_process import ROOT, run

PROGRAMS = {
    "quickstart": "hello_mesh.py",
    "first_actors": "tutorials/first_actors.py",
    "weight_sync": "tutorials/weight_sync.py",
    "tensor_engine": "tutorials/tensor_engine.py",
    "surviving_failures": "tutorials/surviving_failures.py",
    "several_hosts": "tutorials/several_hosts.py",
}
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
OWN_TO_A_RUN = [(re.compile(r"\bprocess \d+"), "process N"), (re.compile(r"\bpid \d+"), "pid N")]


def page_of(tutorial: str) -> Path:
    return ROOT / "docs" / "tutorials" / f"{tutorial}.md"


@dataclass
class Shown:
    """What a page shows of its last script: the blocks of code, and what they print."""

    code: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def last_script(page: Path) -> Shown:
    shown = Shown()
    for fence in FENCE.finditer(page.read_text()):
        info = fence["info"].split()
        if info == ["python"]:
            shown = Shown([fence["body"]])
        elif info == ["python", "continued"]:
            shown.code.append(fence["body"])
        elif info == ["text"]:
            shown.output.append(fence["body"])
        elif info == ["text", "stderr"]:
            shown.errors.append(fence["body"])
    return shown


def lines(*texts: str) -> list[str]:
    """Without blank lines: where a page cuts a program, the formatter wants more of them or fewer."""
    return [line for text in texts for line in text.splitlines() if line.strip()]


def comparable(output: str) -> str:
    for pattern, word in OWN_TO_A_RUN:
        output = pattern.sub(word, output)
    return output


@pytest.mark.parametrize("tutorial", PROGRAMS)
def test_a_tutorial_shows_its_program(tutorial: str) -> None:
    program = PROGRAMS[tutorial]
    code = last_script(page_of(tutorial)).code
    assert lines(*code) == lines((ROOT / "examples" / program).read_text())
    assert f"(../../examples/{program})" in page_of(tutorial).read_text(), "the page links to the program"


@pytest.mark.parametrize("tutorial", PROGRAMS)
def test_a_tutorial_shows_what_its_program_prints(tutorial: str) -> None:
    shown = last_script(page_of(tutorial))
    example = run(f"examples/{PROGRAMS[tutorial]}")
    assert example.process.returncode == 0, example.stderr
    assert comparable(example.stdout) == comparable("".join(shown.output))
    assert comparable(example.stderr) == comparable("".join(shown.errors))


def test_every_program_of_a_tutorial_has_its_page() -> None:
    there = {path.name for path in (ROOT / "examples" / "tutorials").glob("*.py")} - {"__init__.py"}
    assert there == {Path(program).name for program in PROGRAMS.values() if program.startswith("tutorials/")}
