import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from skipper.benchmarks.errors import PeerLostError, PeerTimeoutError
from skipper.benchmarks.peers import runner, session
from skipper.benchmarks.peers.environments import Environment, EnvironmentFailedError, Prepared, link_distributions
from skipper.benchmarks.peers.keeper import descendants
from skipper.benchmarks.peers.protocol import MeasuringTurn
from skipper.benchmarks.peers.roster import ROSTER
from skipper.benchmarks.peers.runner import Outcome, PeersPlan
from skipper.benchmarks.peers.session import Bounds, PeerSession, TooMuchMemoryError
from skipper.benchmarks.peers.work import ROWS

KEEPER = Path(session.keeper.__file__)
LIMIT_S = 20.0
READY = "import json, os, subprocess, sys, time\nprint(json.dumps({'ready': True}), flush=True)\n"


def script(body: str) -> Sequence[str]:
    return [sys.executable, "-c", READY + textwrap.dedent(body)]


def gone(pid: int) -> bool:
    """Whether a process ends within the limit."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)  # a failed test leaves nothing either
    return False


DAEMON = """
    line = sys.stdin.readline()
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(json.dumps({"samples": [daemon.pid]}), flush=True)
"""


def test_a_daemon_in_a_session_of_its_own_is_killed_with_its_peer() -> None:
    with PeerSession.start(script(DAEMON + "    sys.stdin.read()\n")) as peer:
        (pid,) = peer.ask("call", n=1, limit_s=1)["samples"]
        assert pid in descendants(os.getpid())
    assert gone(pid)


def test_a_daemon_is_killed_when_its_peer_was_killed_before() -> None:
    killed = DAEMON + "    os.kill(os.getpid(), 9)\n"
    with PeerSession.start(script(killed)) as peer:
        (pid,) = peer.ask("call", n=1, limit_s=1)["samples"]
        with pytest.raises(PeerLostError, match="exit code 137"):
            peer.ask("call", n=1, limit_s=1)
    assert gone(pid)


def test_all_are_killed_when_the_runner_is(tmp_path: Path) -> None:
    started = tmp_path / "started"
    sleeper = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, {str(KEEPER)!r}, sys.executable, "-c", {sleeper!r}])
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        until = time.monotonic() + LIMIT_S
        while not (started.exists() and started.read_text()) and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert gone(int(started.read_text()))


def test_a_peer_that_hangs_is_ended_at_the_deadline() -> None:
    with PeerSession.start(script("time.sleep(600)"), bounds=Bounds(row_s=0.5)) as peer:
        pid = next(descendants(peer._process.pid))
        with pytest.raises(PeerTimeoutError, match="it hung"):
            peer.ask("call", n=1, limit_s=1)
    assert gone(pid)


def test_a_stopped_peer_is_ended_too() -> None:
    with PeerSession.start(script("time.sleep(600)"), bounds=Bounds(row_s=0.5)) as peer:
        pid = next(descendants(peer._process.pid))
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(PeerTimeoutError):
            peer.ask("call", n=1, limit_s=1)
    assert gone(pid)


def test_a_crash_is_told_with_the_last_words() -> None:
    with (
        pytest.raises(PeerLostError, match="exit code 1: ValueError: no such device"),
        PeerSession.start(script("sys.stdin.readline(); raise ValueError('no such device')")) as peer,
    ):
        peer.ask("call", n=1, limit_s=1)


def test_garbage_is_no_answer() -> None:
    with (
        pytest.raises(PeerLostError, match="invalid answer"),
        PeerSession.start([sys.executable, "-c", "print('hello')"]),
    ):
        pass


def test_a_peer_that_takes_too_much_memory_is_ended() -> None:
    greedy = script("sys.stdin.readline(); kept = bytearray(b'x') * (200 << 20); time.sleep(600)")
    bounds = Bounds(row_s=LIMIT_S, memory_nbytes=100 << 20)
    with pytest.raises(TooMuchMemoryError, match="GiB"), PeerSession.start(greedy, bounds=bounds) as peer:
        peer.ask("call", n=1, limit_s=1)


def test_a_session_leaves_no_file() -> None:
    with PeerSession.start(script("sys.stdin.readline(); print(json.dumps({'cwd': os.getcwd()}), flush=True)")) as peer:
        folder = Path(peer.ask("call", n=1, limit_s=1)["cwd"])
        assert folder.is_dir()
    assert not folder.exists()


class Faulty(runner._Rounds):
    """Asks a script of the test in place of the peer's."""

    body = ""

    def _command(self, peer: object, family: object) -> list[str]:
        return list(script(self.body))


def rounds(body: str, count: int, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    monkeypatch.setattr(Faulty, "body", body)
    memcpy = [peer for peer in ROSTER if peer.name == "memcpy"]
    rows = [row for row in ROWS if row.name in ("read_64B", "read_4KiB", "read_64KiB")]
    outcome = Outcome()
    plan = PeersPlan(peers=memcpy, rows=rows, bounds=Bounds(row_s=LIMIT_S))
    faulty = Faulty(plan, {"memcpy": Prepared(Path(sys.executable), {})}, outcome, lambda _: None)
    for number in range(count):
        faulty.once(number)
    return outcome


ANSWERS = """
for line in sys.stdin:
    row = json.loads(line)["row"]
    {fault}
    print(json.dumps({{"samples": [1000]}}), flush=True)
"""


def test_a_row_that_kills_its_peer_costs_no_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = "if row == 'read_4KiB': raise SystemExit('bang')"
    outcome = rounds(ANSWERS.format(fault=fault), 3, monkeypatch)
    assert set(outcome.samples["read_64B", "memcpy"]) == {0, 1, 2}
    assert set(outcome.samples["read_64KiB", "memcpy"]) == {0, 1, 2}
    assert ("read_4KiB", "memcpy") not in outcome.samples
    assert outcome.reasons["read_4KiB", "memcpy"].endswith("exit code 1: bang")


def test_a_row_is_given_up_after_two_failures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    fault = f"open({str(asked)!r}, 'a').write(row[5:9]); print(json.dumps({{'failed': 'no'}}), flush=True); continue"
    rounds(ANSWERS.format(fault=fault), 4, monkeypatch)
    assert asked.read_text().count("64KiB"[:4]) == 2


def test_what_a_peer_cannot_do_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    fault = f"open({str(asked)!r}, 'a').write('x'); print(json.dumps({{'cannot': 'never'}}), flush=True); continue"
    outcome = rounds(ANSWERS.format(fault=fault), 3, monkeypatch)
    assert asked.read_text() == "xxx"  # each row once
    assert outcome.reasons["read_64B", "memcpy"] == "never"


def test_a_peer_that_cannot_be_installed_gives_rows_that_say_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(environment: Environment) -> Prepared:
        raise EnvironmentFailedError(f"{environment.name} is not installed: no route")

    monkeypatch.setattr(runner, "prepare", fail)
    nixl = [peer for peer in ROSTER if peer.name == "nixl"]
    rows = [row for row in ROWS if row.name in ("read_64B", "call")]
    outcome = Outcome()
    runner.run(PeersPlan(peers=nixl, rows=rows, rounds=1), outcome, lambda _: None)
    assert outcome.reasons["read_64B", "nixl"] == "nixl is not installed: no route"
    assert outcome.reasons["call", "nixl"] == "it moves memory; it has no actors"
    assert not outcome.samples


def test_the_shared_folder_holds_a_distribution_with_what_it_requires_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "stale").symlink_to(tmp_path)
    folder = link_distributions(tmp_path, ("numpy",))
    names = {entry.name for entry in folder.iterdir()}
    assert {"numpy", "skipper"} <= names
    assert not names & {"grpc", "google", "torchstore", "stale", "pytest"}
    code = "import numpy, skipper.benchmarks.peers.protocol; print(numpy.__file__)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(folder)!r}); {code}"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.stdout.startswith(str(folder)), done.stderr


def test_a_turn_warms_up_and_ends_at_its_limit() -> None:
    done: list[int] = []
    assert len(MeasuringTurn(20, 60).times(lambda: done.append(1))) == 20
    assert len(done) == 22
    assert len(MeasuringTurn(1000, 1e-9).times(lambda: None)) == 1
