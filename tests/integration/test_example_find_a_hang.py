"""The story of docs/tutorials/find_a_hang.md, live: a job hangs, and an operator finds the line of code.

The job is ``examples/find_a_hang.py`` with its real processes; the operator looks at it in terminals and in a browser.
The pictures on the page are those of this test: ``make screenshots`` writes them anew.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.control.conftest import alive, wait_until
from tests.control.observe.browser import PATIENCE_MS, browsers, needs_chromium
from tests.control.observe.terminal import Terminal
from tests.integration.example_process import ROOT, run
from tests.screenshots import Screenshots

PROGRAM = ROOT / "examples" / "find_a_hang.py"
PAGE = ROOT / "docs" / "tutorials" / "find_a_hang.md"
PICTURES = ROOT / "docs" / "assets" / "find_a_hang"
COLUMNS = 130
PATIENCE_S = 90.0
CULPRIT = "loaders{'gpus': 3}"
LINE = "return self.ready.get()"
UNWANTED = ("CI", "NO_COLOR", "SKIPPER_PROGRESS", "SKIPPER_LOGS", "SKIPPER_JOB")

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from browsers()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the program, its job, and what it leaves; its name is in the pictures."""
    with tempfile.TemporaryDirectory(prefix="train-") as name:
        folder = Path(name)
        (folder / "run").mkdir(mode=0o700)
        shutil.copy(PROGRAM, folder)
        monkeypatch.chdir(folder)
        for variable in UNWANTED:
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "run"))
        monkeypatch.setenv("SKIPPER_RECORD_FOLDER", str(folder / "records"))
        monkeypatch.setenv("SKIPPER_LOG_FOLDER", str(folder / "logs"))
        yield folder


def skipper(*words: str) -> Terminal:
    """A command in a terminal of its own, which shows what was typed."""
    env = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")
    }  # pytest-xdist sets them
    terminal = Terminal([sys.executable, "-m", "skipper", *words], env, columns=COLUMNS, wraps=True)
    terminal.screen.feed(f"\x1b[1m$ skipper {' '.join(words)}\x1b[0m\n\r")
    return terminal


@pytest.fixture
def job(place: Path) -> Iterator[Terminal]:
    """The job in its terminal, after some steps; nothing of it is left at the end."""
    with skipper("run", "find_a_hang.py") as terminal:
        terminal.read_until(lambda: "step 3: no answers" in terminal.text, PATIENCE_S)
        family = psutil.Process(terminal.process.pid).children(recursive=True)
        yield terminal
        terminal.process.terminate()
        terminal.run(PATIENCE_S)
        wait_until(lambda: not [process for process in family if alive(process.pid)], "nothing of the job is left")


@pytest.fixture
def page(job: Terminal, browser: Browser) -> Iterator[Page]:
    """The job's dashboard, served by the command; nothing that the browser complains of is let pass."""
    command = [sys.executable, "-m", "skipper", "dashboard", "--slow-after", "2", "--hung-after", "8"]
    complaints: list[str] = []
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving,
        browser.new_context(viewport={"width": 1380, "height": 1150}) as context,
    ):
        assert serving.stdout is not None
        try:
            page = context.new_page()
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.goto(serving.stdout.readline().strip())
            yield page
        finally:
            serving.terminate()
    assert complaints == []


@pytest.fixture
def pictures(browser: Browser, pytestconfig: pytest.Config, tmp_path: Path) -> Iterator[Screenshots]:
    """Those of the documentation where it is asked for, else others beside them."""
    folder = PICTURES if pytestconfig.getoption("--screenshots") else tmp_path
    folder.mkdir(exist_ok=True)
    with Screenshots(folder, browser) as pictures:
        yield pictures


def read_to_end(terminal: Terminal) -> str:
    """What a command has written, without its colours."""
    terminal.run(PATIENCE_S)
    return "\n".join(terminal.screen.rows)


@needs_chromium
@pytest.mark.timeout(300)
def test_from_the_first_symptom_to_the_line_of_code(
    place: Path, job: Terminal, page: Page, pictures: Screenshots
) -> None:
    # An evaluation takes longer than the reader's bound for a slow call: amber, and it goes on.
    evaluator = page.locator("tr.actor", has_text="evaluator ·").locator(".state")
    expect(evaluator).to_have_attribute("data-level", "slow")

    # The symptom: no step follows the eighth. Nothing has failed, nobody says anything.
    expect(page.locator("#health")).to_have_text("3 calls hang?")
    job.read_until(lambda: "step 8: loss" in job.text, PATIENCE_S)
    pictures.terminal("run", job.screen.coloured(), COLUMNS)

    # In a terminal: two commands.
    with skipper("status") as terminal:
        said = read_to_end(terminal)
        assert [CULPRIT in row for row in terminal.screen.rows if "busy batch" in row] == [True], said
        assert sum("Loader" in row and "idle" in row for row in terminal.screen.rows) == 3, said
        pictures.terminal("status", terminal.screen.coloured(), COLUMNS)
    with skipper("stacks", "loaders:3") as terminal:
        said = read_to_end(terminal)
        assert LINE in said
        assert re.search(r"Loader\.batch \(\S*find_a_hang\.py:\d+\)", said)
        assert terminal.process.returncode == 0
        pictures.terminal("stacks", terminal.screen.coloured(), COLUMNS)

    # In the browser: what is wrong, and with whom, is on the first page.
    banner = page.locator("#banner")
    expect(banner).to_contain_text(f"{CULPRIT} has been in batch for")
    expect(banner).to_contain_text("generators{'gpus': 0} has been in sync for")
    waiting = page.get_by_role("region", name=re.compile("who waits")).first
    expect(waiting).to_contain_text("policy")
    expect(page.locator("section[aria-label='Service judges'] tbody tr")).to_have_count(2)
    failed = page.locator("#events li[data-error=ValueError]")
    expect(failed).to_have_count(1)
    expect(failed.locator(".times")).to_have_text("\u00d74")
    expect(failed.locator(".event-who")).to_have_text(
        re.compile(r"generators\{'gpus': [01]\}\.answer, generators\{'gpus': [01]\}\.answer")
    )
    pictures.page("overview", page)
    pictures.page("tables", page, page.locator("#tables"))
    failed.locator("summary").click()
    expect(failed.locator("pre")).to_contain_text("raise ValueError(")

    # Two presses from there: the link in the sentence of who waits for nobody, and the button.
    banner.locator("a", has_text=CULPRIT).click()
    page.get_by_role("button", name="Take stacks").click()
    stacks = page.get_by_label("Stacks").locator("pre")
    expect(stacks).to_contain_text("Loader.batch")
    expect(stacks).to_contain_text(LINE)
    pictures.page("actor", page)

    # The operator ends it. What was seen is in the record.
    page.close()
    (kept,) = place.glob("records/*/stacks.jsonl")
    wait_until(lambda: LINE in kept.read_text(), "the stacks are in the record", timeout=PATIENCE_S)
    job.process.send_signal(signal.SIGINT)
    assert job.run(PATIENCE_S) == 130, job.text
    assert "batch has been running for" in job.text  # those that did not end say where they are
    assert "its record: skipper record show" in job.text
    assert "step 9" not in job.text
    with skipper("record", "show") as terminal:
        said = read_to_end(terminal)
        assert LINE in said
        assert "and the model takes 4096" in said
    assert {f"{name}.png" for name in shown_pictures()} == pictures.made


def shown_pictures() -> set[str]:
    """The names of the pictures on the page, all of which are there."""
    shown = set(re.findall(r"\.\./assets/find_a_hang/([\w-]+)\.png", PAGE.read_text()))
    assert {path.stem for path in PICTURES.iterdir()} == shown
    return shown


def test_without_the_mistake_it_ends_well() -> None:
    ended = run(str(PROGRAM), "--mended", "--evaluation", "0", timeout=100.0)
    assert ended.process.returncode == 0, ended.stderr
    assert "step 12: no answers" in ended.stdout
    assert len(re.findall(r"^step \d+: ", ended.stdout, re.MULTILINE)) == 12
    assert ended.stderr == ""
