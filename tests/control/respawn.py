"""Kill and respawn a process over and over: it has to work at once every time, and nothing may grow.

    python -m tests.control.respawn --times 1000

Prints a summary as JSON; the status is 1 where something was left, or has grown by more than a little.
"""

import argparse
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass

import psutil

from skipper import control
from skipper.control import MeshFailure, SupervisionError, this_host
from tests.control.actors import Echo

TIMEOUT_S = 30.0
WARM = 20
"""Deaths after which growth is counted: by then all code is loaded and all pools are filled."""

GROWTH_NBYTES_PER_DEATH = 4096


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds."""

    rss_nbytes: int
    descriptors: int
    threads: int
    children: int

    @staticmethod
    def now() -> "Held":
        """Count it."""
        me = psutil.Process()
        return Held(me.memory_info().rss, me.num_fds(), threading.active_count(), len(me.children(recursive=True)))


def main() -> int:
    """Run it as the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.control.respawn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--times", type=int, default=1000, help="how many deaths (default: %(default)s)")
    times = parser.parse_args().times
    told = 0

    def count(failure: MeshFailure) -> None:
        nonlocal told
        told += 1

    control.unhandled_fault_hook = count
    worst_s, began, warm = 0.0, time.monotonic(), Held.now()
    for number in range(times):
        if number == min(WARM, times - 1):
            warm = Held.now()
        worst_s = max(worst_s, _spawn_and_kill())
    wall_s = time.monotonic() - began
    deadline = time.monotonic() + TIMEOUT_S
    while told < times and time.monotonic() < deadline:
        time.sleep(0.01)
    after = Held.now()
    control.shutdown()
    growth = (after.rss_nbytes - warm.rss_nbytes) / max(times - WARM, 1)
    ok = (
        told == times
        and growth < GROWTH_NBYTES_PER_DEATH
        and after.descriptors <= warm.descriptors + 8
        and after.threads <= warm.threads + 4
        and Held.now().children == 0
    )
    summary = {
        "deaths": times,
        "told": told,
        "mean_s": round(wall_s / times, 3),
        "worst_first_reply_s": round(worst_s, 3),
        "rss_nbytes_per_death": round(growth),
        "after_warm_up": asdict(warm),
        "at_the_end": asdict(after),
        "ok": ok,
    }
    sys.stdout.write(json.dumps(summary, indent=2) + "\n")
    return 0 if ok else 1


def _spawn_and_kill() -> float:
    """Seconds from the spawn to the first reply."""
    began = time.monotonic()
    echo = this_host().spawn_procs().spawn("echo", Echo)
    pid = echo.pid.call_one().get(TIMEOUT_S)
    seconds = time.monotonic() - began
    try:
        echo.die.call_one().get(TIMEOUT_S)
    except SupervisionError:
        if os.path.exists(f"/proc/{pid}"):
            raise
    return seconds


if __name__ == "__main__":
    sys.exit(main())
