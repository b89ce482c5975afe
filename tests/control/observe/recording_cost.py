"""What ``skipper run`` costs a job of many actors, beside the same job without it, in turns.

    python -m tests.control.observe.recording_cost --actors 64 1000 --turns 3

On a machine with other work only the ratios mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tests.control.conftest import REPOSITORY

SCRIPT = Path(__file__).with_name("recording_script.py")
PROCESSES = 16


@dataclass(frozen=True)
class Turn:
    """One run.

    Attributes:
        rounds_per_s: how often the script called all actors.
        script_cpu: what the script's process used, in CPUs.
        recorder_cpu: what the recorder used from the beginning of the job on, in CPUs; 0 without one.
        look_nbytes: of a look in the record, on average.
        looks_per_s: how often it looked.
    """

    rounds_per_s: float
    script_cpu: float
    recorder_cpu: float = 0.0
    look_nbytes: float = 0.0
    looks_per_s: float = 0.0


def turn(folder: Path, actors: int, seconds: float, *, recorded: bool) -> Turn:
    """Run the job once."""
    record = folder / "record"
    words = [str(SCRIPT), str(actors), str(min(PROCESSES, actors)), str(seconds)]
    command = [sys.executable, *(["-m", "skipper", "run", "--folder", str(record)] if recorded else []), *words]
    own = {"XDG_RUNTIME_DIR": str(folder), "SKIPPER_LOG_FOLDER": str(folder / "logs"), "SKIPPER_LOGS": "off"}
    path = f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}"
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **own, "PYTHONPATH": path}
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "there\n"
        recorder = psutil.Process(process.pid)
        begin = _cpu_s(recorder)
        outcome = json.loads(process.stdout.readline())
        used_s = _cpu_s(recorder) - begin
        process.stdin.close()
        assert process.wait(60) == 0
    if not recorded:
        return Turn(outcome["rounds_per_s"], outcome["cpu"])
    looks = [line for path in record.glob("status.jsonl*") for line in path.read_bytes().splitlines()]
    times = [json.loads(line)["taken_s"] for line in looks]
    return Turn(
        rounds_per_s=outcome["rounds_per_s"],
        script_cpu=outcome["cpu"],
        recorder_cpu=used_s / (seconds + 1),
        look_nbytes=statistics.fmean(map(len, looks)),
        looks_per_s=(len(times) - 1) / max(max(times) - min(times), 0.1),
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def cost(actors: int, turns: int, seconds: float) -> dict[str, object]:
    """The medians of several turns of each kind, one after the other."""
    found: dict[bool, list[Turn]] = {False: [], True: []}
    for _ in range(turns):
        for recorded, of_kind in found.items():
            with tempfile.TemporaryDirectory(prefix="recording-") as folder:
                of_kind.append(turn(Path(folder), actors, seconds, recorded=recorded))
    plain, recorded = (_median(of_kind) for of_kind in (found[False], found[True]))
    return {
        "actors": actors,
        "recorded": asdict(recorded),
        "calls, of those without": round(recorded.rounds_per_s / plain.rounds_per_s, 3),
        "CPU of the script, more by": round(recorded.script_cpu - plain.script_cpu, 3),
    }


def _median(turns: Sequence[Turn]) -> Turn:
    return Turn(**{name: statistics.median(asdict(each)[name] for each in turns) for name in asdict(turns[0])})


def main() -> None:
    """Measure as the command line says; prints a line of JSON for each number of actors."""
    parser = argparse.ArgumentParser(prog="python -m tests.control.observe.recording_cost", description=__doc__)
    parser.add_argument("--actors", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    for actors in given.actors:
        print(json.dumps(cost(actors, given.turns, given.seconds)), flush=True)


if __name__ == "__main__":
    main()
