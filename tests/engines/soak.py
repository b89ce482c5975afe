"""A trainer and two engines of vLLM for many syncs, while engines are killed: python -m tests.engines soak --syncs 100

Every so often an engine is killed in the midst of a sync, and another one joins in its place when it has started. After
each sync every engine has to generate what transformers does with the same weights. Prints a summary as JSON; the
status is 1 where a token was wrong, a sync failed, or something took longer than it may.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from tests.engines.processes import EngineProcess, Processes, kill

ENGINES = 2


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.engines soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--syncs", type=int, default=100, help="how many (default: %(default)s)")
    parser.add_argument("--kill-every", type=int, default=5, help="so many syncs an engine dies (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of which engine dies, and when (default: %(default)s)")
    parser.add_argument("--seconds-limit", type=float, default=float("inf"), help="begin no sync after so many seconds")
    parser.add_argument("--background", action="store_true", help="engines read in the background")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        random, options = Random(given.seed), {"background": given.background}
        summary = soak(processes, given.syncs, given.kill_every, random, given.seconds_limit, options)
    print(json.dumps(summary, indent=2))
    return 1 if summary["wrong"] or summary["failed"] else 0


def soak(
    processes: Processes, syncs: int, kill_every: int, random: Random, seconds_limit: float, options: dict[str, Any]
) -> dict[str, Any]:
    """Run it, with these options of the trainer; the summary."""
    counts = Counter(syncs=0, kills=0, joined=0, compared=0, wrong=0)
    failed: list[str] = []
    trainer = processes.trainer()
    starting = [processes.engine() for _ in range(ENGINES + 1)]  # one waits for its turn
    trainer.wait()
    engines = [starting.pop(0).wait() for _ in range(ENGINES)]
    trainer.call("connect", paths=[engine.path for engine in engines], **options)
    begin = time.monotonic()
    while counts["syncs"] < syncs and time.monotonic() - begin < seconds_limit:
        counts["syncs"] += 1
        trainer.call("step")
        expected = trainer.call("expected")[0]
        sending = trainer.begin("send")
        victim: EngineProcess | None = None
        if counts["syncs"] % kill_every == 0:
            time.sleep(random.random() * 0.1)  # somewhere in the sync
            victim = engines.pop(random.randrange(len(engines)))
            kill(victim.process)
            counts["kills"] += 1
        try:
            for answer in sending:
                answer()
        except Exception as error:  # noqa: BLE001  (belongs to the summary)
            failed.append(f"sync {counts['syncs']}: {type(error).__name__}: {error}")
            break
        for engine in engines:
            counts["compared"] += 1
            counts["wrong"] += engine.call("generate") != expected
        if victim is not None:
            starting.append(processes.engine())
            engines.append(starting.pop(0).wait())
            trainer.call("connect", paths=[engine.path for engine in engines], **options)
            counts["joined"] += 1
    return {**counts, "failed": failed, "seconds": round(time.monotonic() - begin, 1)}


if __name__ == "__main__":
    sys.exit(main())
