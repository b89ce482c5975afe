"""What moves tensors between two workers faster: gloo's messages or shared memory.

    python -m tests.tensor_engine.transfers

prints, by size, the median time of a transfer (half a round trip) and of an all-reduce, each way, beside a memcpy and
what gloo's own all-reduce takes. The ways take turns within a run. The thresholds in `point_to_point` and `collectives`
come from here.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from skipper.control import this_host
from skipper.tensor_engine.shared.metadata import metadata
from skipper.tensor_engine.worker import collectives, point_to_point
from skipper.tensor_engine.worker.groups import Group
from tests.tensor_engine.members import Members, members_of

SIZES = (4 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20)
NEVER = 1 << 62


def measure(group: Group, there_and_back: Group, nbytes: int, repeats: int) -> dict[str, float]:
    """Medians in seconds, of one size, seen from this worker."""
    meta = metadata((nbytes // 4,))
    tensor, copy = torch.zeros(meta.shape), torch.zeros(meta.shape)

    def copy_here() -> None:
        copy.copy_(tensor)

    def transfer(way: Group) -> None:
        point_to_point.transfer(way, tensor if way.rank == 0 else None, meta)

    def round_trip() -> None:
        transfer(group)
        transfer(there_and_back)

    def reduce() -> None:
        collectives.all_reduce(group, tensor, meta, "sum")

    def plain_reduce() -> None:
        group.backend.allreduce([tensor.clone()], dist.AllreduceOptions()).wait()

    def by(threshold: int, work: Callable[[], None]) -> float:
        before = point_to_point.STAGED_FROM_NBYTES, collectives.STAGED_FROM_NBYTES
        point_to_point.STAGED_FROM_NBYTES = collectives.STAGED_FROM_NBYTES = threshold
        began = time.perf_counter()
        try:
            work()
        finally:
            point_to_point.STAGED_FROM_NBYTES, collectives.STAGED_FROM_NBYTES = before
        return time.perf_counter() - began

    times: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, taken_s in {
            "memcpy": by(0, copy_here),
            "gloo": by(NEVER, round_trip) / 2,
            "shared": by(0, round_trip) / 2,
            "reduce, gloo": by(NEVER, reduce),
            "reduce, shared": by(0, reduce),
            "gloo's own": by(NEVER, plain_reduce),
        }.items():
            times.setdefault(name, []).append(taken_s)
    return {name: statistics.median(taken[len(taken) // 4 :]) for name, taken in times.items()}


def table(members: Members, sizes: Sequence[int], repeats: int) -> list[tuple[int, dict[str, float]]]:
    """Rows of sizes and medians in seconds, of the first worker."""
    return [(size, members.run_both_ways(measure, size, repeats)) for size in sizes]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="in bytes")
    options = parser.parse_args(arguments)
    procs = this_host().spawn_procs({"gpus": 2}, env={"OMP_NUM_THREADS": "1"})
    rows = table(members_of(procs), options.sizes, options.repeats)
    print(f"{'bytes':>10}", *(f"{name:>15}" for name in rows[0][1]), " (microseconds)")
    for size, medians in rows:
        print(f"{size:>10}", *(f"{taken * 1e6:>15.1f}" for taken in medians.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
