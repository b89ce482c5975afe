"""Many operations in a loop without a fetch: ``python -m tests.tensor_engine.flat --ops 1000000``.

Prints, as JSON, what is remembered and how much memory the script and its workers have after a tenth of the operations,
and at the end.
"""

import argparse
import gc
import json
import sys
from typing import Any

import psutil
import torch

import control
import tensor_engine
from control import ProcMesh, this_host
from tensor_engine.lane import MAIN
from tensor_engine.session import session_of

_TIMEOUT_S = 300.0


def run(procs: ProcMesh, ops: int) -> list[dict[str, int]]:
    """Issue so many operations on two workers, and measure twice."""
    with procs.activate():
        x, step = torch.zeros(64), torch.ones(64)
    reports = []
    for part in (ops // 10, ops - ops // 10):
        most = 0
        for index in range(part // 5):
            y = x * 0.5 + step
            y.mul_(index / 7)
            x = y.view(8, 8).t().reshape(64)
            if index % 1000 == 0:
                most = max(most, session_of(procs).lane(procs).remembered)
        reports.append({"remembered": most, **_memory(procs)})
    return reports


def _memory(procs: ProcMesh) -> dict[str, int]:
    gc.collect()
    session = session_of(procs)
    session.synchronize(_TIMEOUT_S)
    workers: Any = session.workers(MAIN)
    where = "tests.tensor_engine.on_workers"
    return {
        "script_nbytes": psutil.Process().memory_info().rss,
        "worker_nbytes": max(workers.ask.call(f"{where}:resident", 0, None).get(_TIMEOUT_S)),
        "values": max(workers.ask.call(f"{where}:count", 0, None).get(_TIMEOUT_S)),
        "sites": max(workers.ask.call(f"{where}:sites", 0, None).get(_TIMEOUT_S)),
    }


def main(argv: list[str]) -> int:
    """Run it as a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ops", type=int, default=1_000_000)
    given = parser.parse_args(argv)
    procs = this_host().spawn_procs({"gpus": 2}, env={"OMP_NUM_THREADS": "1"})
    json.dump(run(procs, given.ops), sys.stdout, indent=2)
    tensor_engine.shutdown()
    control.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
