"""``skipper logs``, for a job that runs and for one that has ended."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skipper.control.observe.log_files import FOLDER_VARIABLE, LogFiles
from skipper.control.observe.log_reader import LogSource
from skipper.control.observe.logs_command import main


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def ended(home: Path) -> Path:
    """The folder of a job."""
    files = LogFiles(None, "abc")
    for rank in range(2):
        files.keep(LogSource(-1, 1, f"procs{{'gpus': {rank}}}", 100 + rank, actors=("trainers",)), b"\x1b[2Jhello\nand")
    files.close()
    assert files.folder is not None
    return files.folder


Shown = Callable[..., tuple[int, str, str]]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Shown:
    """Runs the command; returns its exit code and what it has written."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_lines_say_whose_they_are(ended: Path, show: Shown) -> None:
    text = "".join(f"[trainers gpus={rank}] {line}\n" for line in ("hello", "and") for rank in range(2))
    assert show() == (0, text, "")
    assert show("trainers[1]") == (0, "[trainers gpus=1] hello\n[trainers gpus=1] and\n", "")
    assert show("--job", "abc", "procs:0", "--since", "1h")[1].count("gpus=0") == 2
    assert show("--since", "2999-01-01") == (0, "", "")
    assert show("-t", "100")[1].partition(" ")[0].count(":") == 2


def test_json_is_an_object_for_each_line(ended: Path, show: Shown) -> None:
    _, out, _ = show("--json", "100")
    first = json.loads(out.splitlines()[0])
    assert first.pop("at_s") > 1.7e9
    assert first == {
        "label": "trainers gpus=0",
        "process": "procs{'gpus': 0}",
        "pid": 100,
        "host": "",
        "stream": "stdout",
        "text": "hello",
    }


def test_mistakes_have_exit_codes_and_are_told(ended: Path, show: Shown) -> None:
    code, out, err = show("nobody")
    assert (code, out) == (1, "")
    assert "these have: procs{'gpus': 0}, procs{'gpus': 1}" in err
    assert show("--job", "other")[0] == 3
    assert show("--since", "yesterday")[0] == 2


def test_without_any_job_it_says_where_it_looked(home: Path, show: Shown) -> None:
    code, _, err = show()
    assert code == 3
    assert str(home) in err


SCRIPT = """
import sys
from skipper.control import Actor, endpoint, this_host
from skipper.control.observe import shown_output

class Trainer(Actor):
    @endpoint
    def say(self, text: str) -> None:
        print(text, flush=True)

trainers = this_host().spawn_procs({"gpus": 2}).spawn("trainers", Trainer)
shown_output().change(aggregate_s=30.0)  # what both say comes as soon as both have
for line in sys.stdin:
    trainers.say.call(line.strip()).get(20)
    print("said", flush=True)
"""


def test_a_running_job_is_followed_to_its_end(home: Path) -> None:
    script = home / "train.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        job.stdin.write("one\n")
        assert sorted(job.stdout.readline() for _ in range(2)) == ["[trainers x2] one\n", "said\n"]
        command = [sys.executable, "-m", "skipper.cli.main", "logs", "-f", "--job", "train", "trainers[1]"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
            assert follower.stdout is not None
            assert follower.stdout.readline() == "[trainers gpus=1] one\n"
            job.stdin.write("two\n")
            assert follower.stdout.readline() == "[trainers gpus=1] two\n"
            job.stdin.close()
            assert follower.stdout.read() == ""
            assert follower.wait() == 0
