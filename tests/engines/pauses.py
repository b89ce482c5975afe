"""How long requests wait while an engine of vLLM gets new weights, in three ways: python -m tests.engines pauses

A trainer of two ranks sends its weights to one engine, which generates all the time. In turns the engine reads them
while it stands still, reads them in the background, and takes vLLM's own path: a file with all weights, and a reload.
For each way it prints medians: how long a sync took, the longest time between two steps of the engine, the tokens that
came out meanwhile, beside those that come out in that time otherwise, and for how long of that time no tokens came.
Requests go on with what they have in the cache. The last line is JSON.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.engines.models import write_folder
from tests.engines.processes import EngineProcess, Processes, TrainerProcesses

LARGE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "vocab_size": 8000,
    "initializer_range": 0.02,
}
"""276 MB of float32."""

WAYS = ("stop and copy", "background", "file")
REQUESTS, TOKENS = 3, 80
QUIET_S = 2.0
FIGURES = ("sync_s", "pause_s", "step_s", "tokens", "usual_tokens", "lost_s")


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.engines pauses",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5, help="how many syncs of each way (default: %(default)s)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        found = measure(processes, given.rounds)
    print(table(found))
    print(json.dumps(found))
    return 0


def measure(processes: Processes, rounds: int) -> dict[str, Any]:
    """Run it; what each sync took, by its way."""
    engine, trainer = processes.engine(**LARGE), processes.trainer(**LARGE)
    trainer.wait()
    engine.wait()
    files = write_folder(processes.folder / "files", **LARGE)
    found: dict[str, Any] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in WAYS:
            connect(trainer, engine, way)
            trainer.call("step")
            record = one_sync(trainer, engine, way, files)
            if number:  # the first one records plans and takes memory
                found[way].append(record)
    found["nbytes"] = trainer.call("nbytes")[0]
    shutil.rmtree(files)
    return found


def connect(trainer: TrainerProcesses, engine: EngineProcess, way: str) -> None:
    """For the next send."""
    if way != "file":
        trainer.call("connect", paths=[engine.path], background=way == "background")


def one_sync(trainer: TrainerProcesses, engine: EngineProcess, way: str, files: Path) -> dict[str, Any]:
    """What one sync took, and what the engine did meanwhile."""
    engine.call("stream", requests=REQUESTS, max_tokens=TOKENS, recomputes=False)
    time.sleep(QUIET_S)
    begin = engine.call("clock")
    if way == "file":
        trainer.call("save", folder=str(files))
        engine.call("reload", folder=str(files))
        more: dict[str, Any] = {}
    else:
        send, update = trainer.call("send")[0], engine.call("look")[0]
        more = {"send": send, "update": update}
    end = engine.call("clock")
    time.sleep(QUIET_S / 4)
    steps = engine.call("end_stream")["steps"]
    before = [(at, tokens) for at, tokens in steps if at < begin]
    tokens_per_s = sum(tokens for _, tokens in before) / (before[-1][0] - before[0][0])
    tokens = sum(tokens for at, tokens in steps if begin < at < end)
    gaps = [(after - at, at, after) for (at, _), (after, _) in pairwise(steps)]
    return {
        "sync_s": end - begin,
        "pause_s": max(gap for gap, at, after in gaps if after > begin and at < end),
        "step_s": statistics.median(gap for gap, _, after in gaps if after < begin),
        "tokens": tokens,
        "usual_tokens": tokens_per_s * (end - begin),
        "lost_s": end - begin - tokens / tokens_per_s,
        **more,
    }


def table(found: dict[str, Any]) -> str:
    """For people."""
    heads = ("sync s", "longest step s", "usual step s", "tokens", "usual tokens", "lost s")
    lines = [f"{'way':14}" + "".join(f"{head:>16}" for head in heads)]
    for way in WAYS:
        medians = [statistics.median(each[name] for each in found[way]) for name in FIGURES]
        shown = [
            f"{value:.0f}" if "tokens" in name else f"{value:.3f}" for name, value in zip(FIGURES, medians, strict=True)
        ]
        lines.append(f"{way:14}" + "".join(f"{each:>16}" for each in shown))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
