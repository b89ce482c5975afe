"""Output of processes at the script: whose it is, what is shown once, what is dropped, what a dead one said last."""

import ctypes
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skipper.control import ActorMesh, ProcMesh, this_host
from skipper.control.observe import LogOptions, Logs, collect_logs
from tests.control.actors import Echo, Manager
from tests.control.conftest import PATIENCE_S, Failures, Output, Script, wait_until


@pytest.fixture
def logs(echoes: ActorMesh[Echo], output: Output) -> Iterator[Logs]:
    with collect_logs(options=LogOptions(aggregate_s=30.0)) as logs:  # what is to be shown once comes at once, or never
        yield logs


def say(text: str) -> None:
    """Runs in an actor."""
    sys.stdout.write(text)
    sys.stdout.flush()


def say_with_c(text: str) -> None:
    """Runs in an actor: as a library of C would."""
    libc = ctypes.CDLL(None)
    libc.printf(b"%s\n", text.encode())
    libc.fflush(None)
    subprocess.run(["sh", "-c", f"echo '{text} below' >&2"], check=True)


def log(message: str) -> None:
    """Runs in an actor."""
    logging.getLogger("some.part").info("%s", message)


def flood(count: int) -> None:
    """Runs in an actor."""
    say("".join(f"flood {number}\n" for number in range(count)))


def test_lines_say_whose_they_are(logs: Logs, echoes: ActorMesh[Echo], output: Output) -> None:
    logs.change(aggregate_s=0)
    echoes.slice(gpus=1).run.call_one(say, "alone\n").get(PATIENCE_S)
    assert output.wait_for("alone") == "[echoes gpus=1] alone\n"


def test_what_all_say_alike_is_shown_once(logs: Logs, echoes: ActorMesh[Echo], output: Output) -> None:
    for step in range(2):
        echoes.run.call(say, f"step {step}\n").get(PATIENCE_S)
    assert output.wait_for("step 1") == "[echoes x2] step 0\n[echoes x2] step 1\n"


def test_words_of_c_libraries_and_of_subprocesses_come_too(logs: Logs, echoes: ActorMesh[Echo], output: Output) -> None:
    logs.change(aggregate_s=0)
    echoes.slice(gpus=0).run.call_one(say_with_c, "from C").get(PATIENCE_S)
    assert output.wait_for("from C") == "[echoes gpus=0] from C\n"
    assert output.wait_for("below", on_stderr=True) == "[echoes gpus=0] from C below\n"


def test_logging_speaks_from_the_level_on_that_is_asked_for(echoes: ActorMesh[Echo], output: Output) -> None:
    with collect_logs(level=logging.INFO):
        echoes.slice(gpus=0).run.call_one(log, "as information").get(PATIENCE_S)
        output.wait_for("[echoes gpus=0] INFO some.part (actor echoes): as information\n", on_stderr=True)


def test_the_last_words_of_a_killed_process_are_shown(logs: Logs, failures: Failures, output: Output) -> None:
    dying = this_host().spawn_procs(name="dying").spawn("dying", Echo)
    logs.change(aggregate_s=0)
    dying.run.broadcast(lambda: (say("no line's end"), os.kill(os.getpid(), signal.SIGKILL)))
    output.wait_for("[dying] no line's end\n")
    failures.wait()


def test_processes_of_actors_speak_under_their_own_names(
    logs: Logs, own_procs: Callable[..., ProcMesh], output: Output
) -> None:
    logs.change(aggregate_s=0)
    manager = own_procs(name="managing").spawn("manager", Manager)
    leaves = manager.grow.call_one(1).get(PATIENCE_S)
    leaves.run.call_one(say, "from below\n").get(PATIENCE_S)
    output.wait_for("[leaves x=0] from below\n")


def test_options_change_while_the_job_runs(logs: Logs, echoes: ActorMesh[Echo], output: Output) -> None:
    one = echoes.slice(gpus=0)
    logs.change(shown=False, aggregate_s=0)
    one.run.call_one(say, "hidden\n").get(PATIENCE_S)
    one.run.call_one(say, "x" * 40_000 + "\n").get(PATIENCE_S)  # is cut; and what follows is read behind it
    wait_until(lambda: not logs._collector._selector.select(0), "all is read")
    looked_at = threading.Event()
    logs._collector.run_soon(looked_at.set)  # in the round after that
    assert looked_at.wait(PATIENCE_S)
    logs.change(shown=True, prefixed=False)
    one.run.call_one(say, "bare\n").get(PATIENCE_S)
    output.wait_for("bare\n")
    assert output.out == "bare\n"
    with pytest.raises(ValueError, match="at least 1"):
        logs.change(max_lines_per_s=0)


def test_each_stream_has_a_file_of_its_own_and_whole(echoes: ActorMesh[Echo], tmp_path: Path) -> None:
    pid = echoes.slice(gpus=1).pid.call_one().get(PATIENCE_S)
    with collect_logs(folder=tmp_path / "logs", options=LogOptions(shown=False, max_lines_per_s=1)):
        echoes.slice(gpus=1).run.call_one(flood, 5000).get(PATIENCE_S)
    file = tmp_path / "logs" / f"workers-gpus=1-{pid}.out"
    lines = file.read_text().splitlines()
    assert (len(lines), lines[0], lines[-1]) == (5000, "flood 0", "flood 4999")


def test_a_flood_is_cut_and_counted(logs: Logs, echoes: ActorMesh[Echo], output: Output) -> None:
    logs.change(max_lines_per_s=100, aggregate_s=0)
    echoes.slice(gpus=0).run.call_one(flood, 5000).get(PATIENCE_S)
    said = output.wait_for(" lines of echoes gpus=0 dropped", on_stderr=True)
    assert said.startswith("[logs] … ")
    assert output.out.count("flood") + logs.dropped == 5000
    assert output.out.count("flood") >= 1000  # what may come at once


def test_an_idle_line_without_an_end_is_shown(logs: Logs, echoes: ActorMesh[Echo], output: Output) -> None:
    logs.change(aggregate_s=0)
    echoes.slice(gpus=0).run.call_one(say, "working...").get(PATIENCE_S)
    output.wait_for("[echoes gpus=0] working...\n")


def test_strangers_at_the_collector_are_turned_away(logs: Logs, echoes: ActorMesh[Echo], output: Output) -> None:
    logs.change(aggregate_s=0)
    for words in (b"", b"{}", b"not json", b'{"name": "x", "pid": 1}'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect("\0" + logs._collector.address)
            stranger.send(words)
    echoes.slice(gpus=0).run.call_one(say, "still there\n").get(PATIENCE_S)
    output.wait_for("[echoes gpus=0] still there\n")


PREAMBLE = """
import sys
from skipper.control import Actor, endpoint, this_host
from skipper.control.observe import LogOptions, collect_logs

class Speaker(Actor):
    @endpoint
    def say(self, text: str, times: int = 1) -> None:
        sys.stdout.write(f"{text}\\n" * times)
        sys.stdout.flush()

speaker = this_host().spawn_procs(name="speaker").spawn("speaker", Speaker)
speaker.initialized.get(20)
"""


def test_what_was_said_before_the_end_of_the_script_is_shown(script: Callable[[str], Script]) -> None:
    running = script(PREAMBLE + 'collect_logs()\nspeaker.say.call_one("the last").get(20)\n')
    assert running.finish() == (0, "[speaker] the last\n", "")


def test_after_the_close_all_is_as_before(script: Callable[[str], Script]) -> None:
    running = script(
        PREAMBLE
        + """
for _ in range(2):
    with collect_logs():
        speaker.say.call_one("collected").get(20)
    speaker.say.call_one("as before").get(20)
"""
    )
    assert running.finish() == (0, "[speaker] collected\n[speaker] as before\n" * 2, "")


def test_a_script_whose_output_nobody_reads_holds_up_nobody(script: Callable[[str], Script]) -> None:
    running = script(
        PREAMBLE
        + """
import skipper.control.observe.log_output
skipper.control.observe.log_output.MAX_WAITING = 1000
collect_logs(options=LogOptions(max_lines_per_s=10**9, max_total_lines_per_s=10**9))
speaker.say.call_one("x" * 100, 50_000).get(30)  # 5 MB: more than all pipes hold
sys.stderr.write("all is said\\n")
"""
    )
    assert running.process.stderr is not None
    assert running.process.stderr.readline() == "all is said\n"
    code, out, err = running.finish()
    assert code == 0
    shown = out.count("[speaker] x")
    assert 1000 < shown < 50_000
    dropped = re.findall(r"^\[logs\] … ([\d,]+) lines of speaker dropped", err, re.MULTILINE)
    assert shown + sum(int(number.replace(",", "")) for number in dropped) == 50_000


# What a script has by default

DEFAULT = """
import os, signal, sys
from skipper.control import Actor, endpoint, this_host
from skipper.control.observe import shown_output

class Speaker(Actor):
    @endpoint
    def say(self, text: str) -> None:
        print(text, flush=True)
        print(text, file=sys.stderr, flush=True)

    @endpoint
    def fail(self) -> None:
        raise ValueError("no batch")

    @endpoint
    def last(self) -> None:
        os.write(1, b"x" * 10_000 + b"\\nlast words")
        os.kill(os.getpid(), signal.SIGKILL)

speakers = this_host().spawn_procs({"gpus": 2}).spawn("speakers", Speaker)
speakers.initialized.get(20)
if logs := shown_output():
    logs.change(aggregate_s=30.0)  # what both say comes as soon as both have, the rest in the end
"""


def started(tmp_path: Path, program: str, **environment: str) -> tuple[int, str, str]:
    path = tmp_path / "train.py"
    path.write_text(DEFAULT + program)
    variables = {**os.environ, "SKIPPER_LOG_FOLDER": str(tmp_path / "kept"), **environment}
    done = subprocess.run(
        [sys.executable, path], env=variables, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_output_has_names_by_default(tmp_path: Path) -> None:
    program = 'speakers.say.call("hello").get(20)\nspeakers.slice(gpus=1).say.call_one("alone").get(20)\n'
    code, out, err = started(tmp_path, program)
    assert code == 0
    assert out == err == "[speakers x2] hello\n[speakers gpus=1] alone\n"
    assert len(list(tmp_path.glob("kept/*/procs-gpus=*.log"))) == 2


@pytest.mark.parametrize(
    ("word", "shown"), [("raw", "hello\n" * 2), ("off", ""), ("labelled", "[speakers x2] hello\n")]
)
def test_a_variable_says_how_it_is_shown(tmp_path: Path, word: str, shown: str) -> None:
    code, out, err = started(tmp_path, 'speakers.say.call("hello").get(20)\n', SKIPPER_LOGS=word)
    assert code == 0
    assert sorted(out) == sorted(err) == sorted(shown)  # what is raw may be mixed within lines
    assert bool(list(tmp_path.glob("kept/*/*.log"))) == (word != "raw")


def test_another_word_is_a_mistake(tmp_path: Path) -> None:
    code, _, err = started(tmp_path, "", SKIPPER_LOGS="loud")
    assert code == 1
    assert err.endswith("ValueError: SKIPPER_LOGS is raw, off or labelled, not 'loud'\n")


def test_options_of_the_default_change(tmp_path: Path) -> None:
    program = 'shown_output().change(prefixed=False)\nspeakers.slice(gpus=1).say.call_one("bare").get(20)\n'
    assert started(tmp_path, program) == (0, "bare\n", "bare\n")


def test_the_last_words_of_a_killed_process_are_shown_and_kept(tmp_path: Path) -> None:
    program = """
try:
    speakers.slice(gpus=1).last.call_one().get(20)
except Exception as error:
    print(type(error).__name__)
"""
    code, out, _ = started(tmp_path, program)
    assert (code, out.count("x" * 10_000), out.count("[speakers gpus=1] last words\n")) == (0, 1, 1)
    (file,) = tmp_path.glob("kept/*/procs-gpus=1-*.log")
    assert file.read_bytes().endswith(b" stdout P last words\n")


def test_an_error_of_an_actor_is_told_once(tmp_path: Path) -> None:
    code, out, err = started(tmp_path, "speakers.slice(gpus=1).fail.call_one().get(20)\n")
    assert (code, out) == (1, "")
    assert "[speakers" not in err, "its process says nothing: the exception of the script tells all"
    assert err.count("--- remote traceback ---") == 1


def test_processes_forked_from_a_server_speak_under_their_names_too(tmp_path: Path) -> None:
    code, out, _ = started(tmp_path, 'speakers.say.call("hello").get(20)\n', SKIPPER_PRELOAD="json")
    assert (code, out) == (0, "[speakers x2] hello\n")


def test_a_terminal_gets_colours_unless_nobody_wants_them(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(DEFAULT + 'speakers.slice(gpus=1).say.call_one("hello").get(20)\n')
    for variables, expected in (
        ({}, rb"\x1b\[\d+m\[speakers gpus=1\]\x1b\[0m hello"),
        ({"NO_COLOR": "1"}, rb"^\[speakers gpus=1\] hello"),
    ):
        ours, theirs = os.openpty()
        kept = str(tmp_path / "kept")
        environment = {
            **os.environ,
            "TERM": "xterm",
            "SKIPPER_LOG_FOLDER": kept,
            "SKIPPER_PROGRESS": "off",
            **variables,
        }
        with subprocess.Popen([sys.executable, path], env=environment, stdout=theirs, stderr=theirs):
            os.close(theirs)
            shown = b""
            while len(re.findall(rb"hello", shown)) < 2:
                shown += os.read(ours, 4096)
        os.close(ours)
        assert re.search(expected, shown, re.MULTILINE), shown


def test_what_is_not_shown_is_counted_exactly_and_kept(tmp_path: Path) -> None:
    program = """
from tests.control.observe.test_logs import flood
class Flooding(Actor):
    @endpoint
    def flood(self, count: int) -> None:
        flood(count)
flooding = this_host().spawn_procs({"gpus": 4}, name="loud").spawn("flooding", Flooding)
flooding.flood.call(20_000).get(20)
"""
    here = Path(__file__).parents[3]
    code, out, err = started(tmp_path, program, PYTHONPATH=f"{here}/src:{here}")
    assert code == 0
    alike = re.findall(r"^\[flooding (?:x(\d+)|gpus=\d+(?: and (\d+) alike)?)\] flood \d+$", out, re.MULTILINE)
    shown = sum(int(same) if same else 1 + int(others or 0) for same, others in alike)
    dropped = re.findall(r"^\[logs\] … ([\d,]+) lines of .* dropped; all of them are in (.*)$", err, re.MULTILINE)
    assert shown + sum(int(count.replace(",", "")) for count, _ in dropped) == 80_000
    assert 1000 < shown < 10_000
    kept = [file.read_text().count("flood") for file in tmp_path.glob("kept/*/loud-gpus=*.log")]
    assert kept == [20_000] * 4
    assert {Path(place).parent for _, place in dropped} <= {tmp_path / "kept", *tmp_path.glob("kept/*")}
