"""``skipper run`` and ``skipper record``: real scripts, however they end, and what is left of them."""

import contextlib
import json
import os
import pty
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from skipper.cli import main
from skipper.control.observe.record import Record, find_record
from skipper.control.observe.status import JobStatus
from tests.control.conftest import PATIENCE_S, REPOSITORY, alive, wait_until
from tests.control.observe.test_record import ended

PREAMBLE = """
import os, signal, sys, time
from skipper import control
from skipper.control import Actor, endpoint, this_host

class Trainer(Actor):
    @endpoint
    def step(self, n):
        print("step", n)
        return 10 // n

    @endpoint
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def hang(self):
        time.sleep(600)

"""
TRAINERS = 'trainers = this_host().spawn_procs({"gpus": 2}, name="workers").spawn("trainer", Trainer)\n'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("SKIPPER_RECORD_FOLDER", str(tmp_path / "records"))
    monkeypatch.setenv("SKIPPER_LOG_FOLDER", str(tmp_path / "logs"))
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}/src:{REPOSITORY}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


Started = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(place: Path) -> Iterator[Started]:
    """Starts ``skipper run`` with a script, whose text is given."""
    with contextlib.ExitStack() as stack:

        def start(
            text: str, *words: str, flags: tuple[str, ...] = ("--interval", "0.2"), **how: object
        ) -> "subprocess.Popen[str]":
            (place / "train.py").write_text(textwrap.dedent(text))
            process = subprocess.Popen(
                [sys.executable, "-m", "skipper", "run", *flags, "train.py", *words],
                **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **how},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=3 * PATIENCE_S)
    return process.returncode, out, err


def kinds(record: Record) -> list[str]:
    return [event.kind for event in record.events()]


def last_look(record: Record) -> JobStatus:
    status = record.last_status()
    assert status is not None
    return status


def wait_for_record(condition: Callable[[Record], bool], what: str) -> Record:
    def holds() -> bool:
        with contextlib.suppress(LookupError):
            return condition(find_record(None))
        return False

    wait_until(holds, what)
    return find_record(None)


def child_of(process: "subprocess.Popen[str]") -> int:
    return int(psutil.Process(process.pid).children()[0].pid)


def test_the_script_is_run_as_python_runs_it(start: Started, place: Path) -> None:
    text = "import sys; print(sys.argv[1:], sys.stdin.read(), __name__); print('err', file=sys.stderr); sys.exit(7)"
    running = start(text, "--json", "-v", "--", "x y", stdin=subprocess.PIPE)
    out, err = running.communicate("typed", timeout=3 * PATIENCE_S)
    assert running.returncode == 7
    assert out == "['--json', '-v', '--', 'x y'] typed __main__\n"
    folder = find_record(None).folder
    assert err == f"err\nskipper run: train exited with code 7; its record: skipper record show {folder}\n"
    assert kinds(find_record(None)) == ["begin", "end"]


def test_a_module_is_run_and_a_run_that_ends_well_says_nothing(place: Path) -> None:
    (place / "pkg").mkdir()
    (place / "pkg" / "mod.py").write_text("import sys; print(sys.argv[1:])")
    done = subprocess.run(
        [sys.executable, "-m", "skipper", "run", "--name", "mine", "-m", "pkg.mod", "3"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "['3']\n", "")
    record = find_record("mine")
    assert (record.outcome, record.is_running) == ("ended well", False)


def test_the_record_holds_errors_deaths_and_the_last_state_of_a_short_script(start: Started) -> None:
    code, _, err = finish(
        start(
            PREAMBLE
            + "control.unhandled_fault_hook = lambda failure: None\n"
            + TRAINERS
            + """
for rank in range(2):
    try:
        trainers.slice(gpus=rank).step.call_one(0).get()
    except control.ActorError:
        pass
try:
    trainers.slice(gpus=1).die.call_one().get()
except control.SupervisionError:
    pass
raise KeyError("the script's own")
"""
        )
    )
    assert code == 1
    assert "skipper record show" in err.splitlines()[-1]
    record = find_record("train")
    events = {event.kind: event for event in record.events()}
    assert {"begin", "job", "process", "error", "death", "exception", "logs", "job-end", "end"} <= set(events)
    assert "was killed by signal 9" in events["death"].message
    assert "KeyError" in events["exception"].message
    assert "the script's own" in events["exception"].traceback
    # The other process may have been killed before it was looked at.
    (error,) = [event for event in record.events() if event.who == "trainer{'gpus': 0}.step"]
    assert (error.kind, error.more["count"], error.more["error"]) == ("error", 1, "ZeroDivisionError")
    assert any("in step" in event.traceback for event in record.events() if event.kind == "error")
    assert events["logs"].message.startswith(os.environ["SKIPPER_LOG_FOLDER"])
    names = [process.name for process in last_look(record).processes]
    assert names == ["script", "workers{'gpus': 0}"]


def test_after_kill_9_the_record_holds_what_was_there_until_then(start: Started) -> None:
    running = start(
        PREAMBLE
        + TRAINERS
        + "hanging = trainers.hang.call()\n"
        + "try:\n    trainers.slice(gpus=0).step.call_one(0).get(0.1)\nexcept Exception:\n    pass\n"
        + "print('up', flush=True)\ntime.sleep(600)",
        flags=("--interval", "0.2", "--stacks", "0.5"),
    )
    record = wait_for_record(
        lambda record: any("Trainer.hang (" in stacks.text for stacks in record.stacks()), "the stacks show the hang"
    )
    workers = [process.pid for process in last_look(record).processes[1:]]
    seen_s = last_look(record).taken_s
    os.kill(child_of(running), signal.SIGKILL)
    code, _, err = finish(running)
    assert code == 128 + signal.SIGKILL
    assert "was killed by signal 9 (SIGKILL); its record: skipper record show" in err
    record = find_record(None)
    last = last_look(record)
    assert last.taken_s >= seen_s
    assert [actor.doing[0].endpoint for actor in last.actors] == ["hang", "hang"]
    assert kinds(record)[-2:] == ["job-end", "end"]
    assert record.about["status"] == -9
    for pid in workers:
        wait_until(lambda pid=pid: not alive(pid or 0), "the job has ended, too")
    assert list(Path(os.environ["XDG_RUNTIME_DIR"], "skipper").glob("*.json")) == []


def test_a_record_is_left_where_the_whole_group_is_killed(start: Started) -> None:
    running = start(PREAMBLE + TRAINERS + "time.sleep(600)", start_new_session=True)
    wait_for_record(lambda record: len(list(record.statuses())) > 2, "it has looked")
    script = child_of(running)
    os.killpg(running.pid, signal.SIGKILL)
    finish(running)
    wait_until(lambda: not alive(script), "the script has ended")
    record = find_record(None)
    assert not record.is_running
    assert "how is not known" in record.outcome
    assert len(list(record.statuses())) > 2


def test_the_script_ends_with_skipper_run(start: Started, place: Path) -> None:
    running = start(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (open('told', 'w').close(), sys.exit()))\n"
        "open('ready', 'w').close(); time.sleep(600)"
    )
    wait_until((place / "ready").exists, "the script is there")
    running.kill()
    wait_until((place / "told").exists, "the script is told")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_the_script_once(start: Started, place: Path, number: signal.Signals) -> None:
    running = start(
        f"""
        import signal, sys, time
        got = []
        signal.signal({int(number)}, lambda *_: got.append(1))
        open("ready", "w").close()
        while not got:
            time.sleep(0.01)
        time.sleep(0.2)
        sys.exit(40 + len(got))
        """
    )
    wait_until((place / "ready").exists, "the script is there")
    running.send_signal(number)
    assert finish(running)[0] == 41


def test_ctrl_c_at_a_terminal_reaches_the_script_once(start: Started, place: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        running = start(
            """
            import sys, time
            got = 0
            for seconds in (60, 0.5):
                try:
                    open("ready", "w").close()
                    time.sleep(seconds)
                except KeyboardInterrupt:
                    got += 1
            sys.exit(40 + got)
            """,
            stdin=theirs,
            stderr=subprocess.DEVNULL,
            preexec_fn=_take_terminal,
        )
        wait_until((place / "ready").exists, "the script is there")
        os.write(ours, b"\x03")
        assert finish(running)[0] == 41
    finally:
        os.close(ours)
        os.close(theirs)


def _take_terminal() -> None:
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_report_of_a_failure_that_nobody_handled_names_the_record(start: Started) -> None:
    code, _, err = finish(start(PREAMBLE + TRAINERS + "trainers.slice(gpus=0).die.broadcast()\ntime.sleep(600)"))
    record = find_record(None)
    assert code == 1
    assert f"the record of this run: {record.folder}" in err
    (unhandled,) = [event for event in record.events() if event.kind == "unhandled"]
    assert "SIGKILL" in unhandled.message


def test_a_job_that_begins_anew_is_recorded_again(start: Started) -> None:
    code, _, _ = finish(start(PREAMBLE + "for _ in range(2):\n    control.this_proc()\n    control.shutdown()"))
    record = find_record(None)
    assert code == 0
    assert [kind for kind in kinds(record) if kind in ("job", "job-end")] == ["job", "job-end"] * 2
    assert len({status.job for status in record.statuses()}) == 2


def test_a_full_disk_stops_the_record_and_not_the_script(start: Started) -> None:
    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))

    running = start(
        PREAMBLE + TRAINERS + "print(trainers.step.call(5).get().values() is not None)\ntime.sleep(1)",
        preexec_fn=little_room,
    )
    code, out, err = finish(running)
    assert (code, "True\n" in out) == (0, True), err
    assert "parts of it are missing: [Errno 27] File too large" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("missing.py",), "there is no script missing.py"),
        (("-m", "no_such_module"), "there is no module no_such_module"),
        (("--name", "a/b", "train.py"), "a job's name is made of"),
        (("--interval", "0", "train.py"), "not a positive number of seconds"),
        ((), "the following arguments are required"),
    ],
)
def test_mistakes_are_told_before_anything_begins(
    place: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "train.py").write_text("open('begun', 'w')")
    assert main.main(["run", *words]) == 2
    assert said in capsys.readouterr().err
    assert not (place / "begun").exists()
    assert not (place / "records").exists()


def test_a_name_that_a_running_job_has_is_refused_or_made_another(start: Started, place: Path) -> None:
    start(PREAMBLE + "control.this_proc(); time.sleep(600)")
    wait_for_record(lambda record: record.last_status() is not None, "it is recorded")
    again = [sys.executable, "-m", "skipper", "run"]
    refused = subprocess.run([*again, "--name", "train", "train.py"], capture_output=True, text=True)
    assert (refused.returncode, "is already called 'train'" in refused.stderr) == (2, True)
    (place / "other").mkdir()
    (place / "other" / "train.py").write_text("")
    assert subprocess.run([*again, "other/train.py"], capture_output=True, text=True).returncode == 0
    assert find_record(None).name.startswith("train-")


# skipper record

Shown = Callable[..., tuple[int, str, str]]


@pytest.fixture
def skipper(place: Path, capsys: pytest.CaptureFixture[str]) -> Shown:
    """Runs a command of ``skipper``; returns its exit code and what it has written."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main.main(["record", *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_records_are_listed_shown_and_replayed(start: Started, skipper: Shown) -> None:
    code, out, err = skipper()
    assert (code, out) == (0, "")
    assert "skipper run makes them" in err
    finish(start(PREAMBLE + TRAINERS + "trainers.slice(gpus=1).step.call_one(0).get()"))
    code, out, _ = skipper()
    assert (code, "exited with code 1" in out, out.count("\n")) == (0, True, 1)
    code, shown, _ = skipper("show", "train")
    assert code == 0
    assert shown.startswith("train exited with code 1\n")
    assert "at the last look" in shown
    assert "ZeroDivisionError" in shown
    assert shown.count("in step") == 2  # of the actor's error, and of the script's
    assert "skipper logs --job" in shown
    code, replayed, _ = skipper("replay", "--speed", "1000")
    assert code == 0
    assert "trainer{'gpus': 1} Trainer" in replayed
    assert replayed.rstrip().endswith("train: exited with code 1")
    whole = json.loads(skipper("show", "--json")[1])
    assert whole["about"]["status"] == 1
    assert whole["status"]["processes"][0]["name"] == "script"
    assert json.loads(skipper("show", "--json", "train")[1]) == whole
    assert [each["name"] for each in json.loads(skipper("--json")[1])] == ["train"]
    assert skipper("--json", "show")[0] == 2
    assert skipper("show", "nobody")[0] == 1


def test_what_actors_have_said_cannot_steer_the_terminal(skipper: Shown) -> None:
    folder = ended("train", outcome="\x1b[2J", command=["a\x1b]0;x\x07"], cwd="\x9b2J")
    events = [
        {"at_s": 1.0, "kind": "error", "who": "\x1b[2Jme", "message": "a\rb\x1b[5n\nc", "traceback": "\x1b[2J"},
        {"at_s": 2.0, "kind": "death", "who": "w", "message": "\x1b[2J"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "stacks.jsonl").write_text(json.dumps({"at_s": 1.0, "why": "\x1b[2J", "text": "\x1b[2Jx\n"}) + "\n")
    code, out, _ = skipper("show", "-a")
    assert code == 0
    assert not {"\x1b", "\r", "\x07", "\x9b"} & set(out)


def test_a_link_in_a_record_is_refused(skipper: Shown, place: Path) -> None:
    folder = ended("train")
    (place / "secret").write_text('{"at_s": 1.0, "kind": "death", "who": "w", "message": "secret"}\n')
    (folder / "events.jsonl").symlink_to(place / "secret")
    code, out, err = skipper("show")
    assert (code, "secret" in out, "is a link" in err) == (1, False, True)
