"""Every code block of the README and of docs/ does what the page says: it runs."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.preloading import plainly

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = [
    *(page for kind in ("tutorials", "howto", "explanation") for page in sorted((ROOT / "docs" / kind).rglob("*.md"))),
    *(ROOT / "docs" / f"{name}.md" for name in ("choose", "faq", "install", "stability", "upgrade_0_2")),
]
LONGEST_GUIDE_WORDS = 1500
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?!https?://|mailto:|#)(?P<target>[^)#]+)")
COVERED_ELSEWHERE = {
    "make test": "this very run",
    "make demo": "test_demo_reaches_its_reward_and_leaves_its_report",
    "python examples/find_a_hang.py --mended --evaluation 0": "test_without_the_mistake_it_ends_well",
}


@dataclass(frozen=True)
class Block:
    """One runnable piece of a page; of a script of several, ``begins`` is the line of the first."""

    page: str
    line: int
    text: str
    begins: int = 0

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def _scripts(page: Path) -> list[Block]:
    """The page's python blocks; one marked `continued` runs after those before it, as one script."""
    found: list[Block] = []
    text = page.read_text()
    for fence in FENCE.finditer(text):
        info = fence["info"].split()
        if not info or info[0] != "python":
            continue
        line = text.count("\n", 0, fence.start()) + 1
        begins = found[-1].begins if "continued" in info[1:] else line
        found.append(Block(str(page.relative_to(ROOT)), line, fence["body"], begins))
    return found


def _commands(page: Path) -> list[Block]:
    """The lines that a `console` block tells the reader to type."""
    found: list[Block] = []
    text = page.read_text()
    for fence in FENCE.finditer(text):
        if fence["info"].split()[:1] != ["console"]:
            continue
        line = text.count("\n", 0, fence.start()) + 1
        for number, typed in enumerate(fence["body"].splitlines(), line + 1):
            command = typed.removeprefix("$ ").split("  #")[0].strip()
            if typed.startswith("$ ") and "# not run here" not in typed and command not in COVERED_ELSEWHERE:
                found.append(Block(str(page.relative_to(ROOT)), number, command))
    return found


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """What blocks run with. Their temporary files end with the test, and have short paths: some are sockets."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(prefix="docs-") as scratch:
        own = {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default", "TMPDIR": scratch}
        yield {**plainly(os.environ), **own}


@dataclass(frozen=True)
class Ran:
    """How a script ended, and the lines of its blocks that have been run to their end."""

    status: int
    output: str
    through: tuple[int, ...]


RunScript = Callable[[Block, dict[str, str]], Ran]


@pytest.fixture(scope="module")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> RunScript:
    """Runs the script that a block is a part of, once for all of its blocks."""
    ran: dict[tuple[str, int], Ran] = {}

    def run(block: Block, environment: dict[str, str]) -> Ran:
        if (block.page, block.begins) not in ran:
            ran[block.page, block.begins] = _run(block, tmp_path_factory.mktemp("block"), environment)
        return ran[block.page, block.begins]

    return run


def _run(part: Block, folder: Path, environment: dict[str, str]) -> Ran:
    blocks = [block for block in _scripts(ROOT / part.page) if block.begins == part.begins]
    marks = {block.line: folder / f"through-{block.line}" for block in blocks}
    script = folder / "block.py"
    mark = "if __name__ == '__main__':\n    open({!r}, 'x').close()"  # processes that it spawns import it, too
    script.write_text("\n".join(f"{block.text}\n{mark.format(str(marks[block.line]))}" for block in blocks))
    try:
        done = subprocess.run(
            [sys.executable, str(script)], cwd=folder, env=environment, capture_output=True, text=True, timeout=110
        )
        status, output = done.returncode, f"{done.stdout}\n{done.stderr}"
    except subprocess.TimeoutExpired as error:  # once for all of its blocks, too
        status, output = 1, f"{error}\n{error.stdout!r}\n{error.stderr!r}"
    return Ran(status, output, tuple(line for line, mark in marks.items() if mark.exists()))


@pytest.mark.parametrize("block", [b for page in PAGES for b in _scripts(page)], ids=str)
def test_python_block_runs(block: Block, run_script: RunScript, environment: dict[str, str]) -> None:
    ran = run_script(block, environment)
    assert block.line in ran.through, f"{block}\n{ran.output}"
    is_last = block.line == max(b.line for b in _scripts(ROOT / block.page) if b.begins == block.begins)
    assert not is_last or ran.status == 0, f"{block}\n{ran.output}"


@pytest.mark.parametrize("command", [c for page in PAGES for c in _commands(page)], ids=str)
def test_command_runs_as_printed(command: Block, environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-ec", command.text], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, f"{command}: {command.text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    broken = [m["target"] for m in LINK.finditer(text) if not (page.parent / m["target"]).exists()]
    assert broken == []


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_guide_is_short(page: Path) -> None:
    assert len(page.read_text().split()) <= LONGEST_GUIDE_WORDS, "what is exact belongs in docs/reference"


def test_the_readme_has_blocks_to_run() -> None:
    readme = ROOT / "README.md"
    assert _scripts(readme)
    assert _commands(readme)


def test_the_readme_shows_the_example_as_it_is() -> None:
    shown = _scripts(ROOT / "README.md")[0].text
    assert shown == (ROOT / "examples" / "hello_mesh.py").read_text()
