"""A script whose actors print more than any terminal shows, while it prints itself and calls another actor.

    python -m tests.control.observe.flood_script --outcome FILE

`flood` runs it in a terminal.
"""

import argparse
import json
import math
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from skipper import control
from skipper.control import Actor, endpoint, this_host
from skipper.control.observe import shown_output


@dataclass(frozen=True)
class Flood:
    """How many print, and how much.

    Attributes:
        actors: in all.
        processes: that they are in.
        lines_per_s: of each actor.
        seconds: for so long.
    """

    actors: int
    processes: int
    lines_per_s: int
    seconds: float


def word(number: int) -> str:
    """A number in letters: lines that differ in digits only would be shown once."""
    letters = ""
    while number or not letters:
        number, digit = divmod(number, 26)
        letters += chr(ord("a") + digit)
    return letters


class Talker(Actor):
    """Prints lines of its own, and among ten of them one that all others print as well."""

    def __init__(self, number: int) -> None:
        self.name = word(number)

    @endpoint
    def talk(self, lines_per_s: int, seconds: float) -> int:
        """Print; returns how many lines."""
        begin, printed = time.monotonic(), 0
        while (now := time.monotonic() - begin) < seconds:
            due = int(now * lines_per_s) + 1
            for line in range(printed, due):
                print("the queue is empty" if line % 10 == 0 else f"{self.name} has read {word(line)}")
            printed = due
            time.sleep(0.05)
        return printed


class Bystander(Actor):
    """Is called meanwhile."""

    @endpoint
    def ping(self) -> str:
        """Answer."""
        return "pong"


def beat(over: threading.Event, beats: list[float], times: list[float]) -> None:
    """Print twice a second, and call an actor: how long that takes is added to the lists."""
    bystander = this_host().spawn_procs(name="bystander").spawn("bystander", Bystander)
    bystander.ping.call_one().get(60)
    while not over.wait(0.5):
        begin = time.monotonic()
        bystander.ping.call_one().get(60)
        times.append(time.monotonic() - begin)
        beats.append(time.time())
        print(f"the script: beat {len(beats)} at {beats[-1]:.3f}")


def run(flood: Flood) -> dict[str, object]:
    """Have them print; returns what there is to tell of it once all output has been dealt with."""
    procs = this_host().spawn_procs({"gpus": flood.processes}, name="talking")
    each = math.ceil(flood.actors / flood.processes)
    meshes = [procs.spawn(f"talkers{word(number)}", Talker, number) for number in range(each)]
    for mesh in meshes:
        mesh.initialized.get(120)
    over, beats, times = threading.Event(), list[float](), list[float]()
    beating = threading.Thread(target=beat, args=(over, beats, times))
    beating.start()
    calls = [mesh.talk.call(flood.lines_per_s, flood.seconds) for mesh in meshes]
    printed = sum(sum(call.get(flood.seconds + 300)) for call in calls)
    over.set()
    beating.join()
    logs = shown_output()
    control.shutdown()
    assert logs is not None
    return {
        "actors": each * flood.processes,
        "printed": printed,
        "dropped": logs.dropped,
        "beats": len(beats),
        "ping_ms": sorted(round(1e3 * each, 1) for each in times),
        "folder": str(logs.folder),
    }


def main() -> None:
    """Run as the command line says, and write the outcome to a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--actors", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--lines", type=int, default=100, help="a second, of each actor")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--outcome", type=Path, required=True, help="file for the outcome, as JSON")
    given = parser.parse_args()
    outcome = run(Flood(given.actors, given.processes, given.lines, given.seconds))
    given.outcome.write_text(json.dumps(outcome))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
