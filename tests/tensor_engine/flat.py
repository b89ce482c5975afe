"""Many operations in a loop without a fetch: ``python -m tests.tensor_engine.flat --ops 1000000 [--replays]``.

With ``--replays`` they are those of a compiled program. Prints, as JSON, what is remembered and how much memory the
script and its workers have after a tenth of the operations, and at the end.
"""

import argparse
import gc
import json
import sys
from typing import Any

import psutil
import torch

from skipper import control, tensor_engine
from skipper.control import ProcMesh, this_host
from skipper.tensor_engine.script.instruction_stream import MAIN
from skipper.tensor_engine.script.session import session_of

_TIMEOUT_S = 300.0
_ROUND_OPS = 5
_ROUNDS = 24  # in a program


def run(procs: ProcMesh, ops: int, *, replays: bool = False) -> list[dict[str, int]]:
    """Issue so many operations on two workers, one by one or as replays, and measure twice."""
    with procs.activate():
        x, step = torch.zeros(64), torch.ones(64)
    count = ops // (_ROUND_OPS * _ROUNDS if replays else _ROUND_OPS)
    work = tensor_engine.compile(_rounds) if replays else _round
    instruction_stream = session_of(procs).instruction_stream(procs)
    reports = []
    for part in (count // 10, count - count // 10):
        most = 0
        for index in range(part):
            x = work(x, step, 0.5 if replays else index / 7)
            if index % 100 == 0:
                most = max(most, instruction_stream.remembered)
        reports.append({"remembered": most, **_memory(procs)})
    return reports


def _round(x: torch.Tensor, step: torch.Tensor, factor: float) -> torch.Tensor:
    y = x * 0.5 + step
    y.mul_(factor)
    return y.view(8, 8).t().reshape(64)


def _rounds(x: torch.Tensor, step: torch.Tensor, factor: float) -> torch.Tensor:
    for _ in range(_ROUNDS):
        x = _round(x, step, factor)
    return x


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
    parser.add_argument("--replays", action="store_true", help="of a compiled program")
    given = parser.parse_args(argv)
    procs = this_host().spawn_procs({"gpus": 2}, env={"OMP_NUM_THREADS": "1"})
    json.dump(run(procs, given.ops, replays=given.replays), sys.stdout, indent=2)
    tensor_engine.shutdown()
    control.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
