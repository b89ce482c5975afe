"""How a store bears many keys: memory of its controller, and what an operation costs among 1,000, 100,000, 1,000,000.

    python -m tests.torchstore.keys --count 1000000

The store lives in this process, so that its memory is this process'. Each value is a number, which travels in the
message; the keys are those of many models, ``model3.layer17.weight5``. Figures are medians in microseconds, and beside
them how many times that of the smallest table. The last row is what a sweep over all keys costs: the death of a process
that used the store, during which the controller answers nobody.
"""

import argparse
import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator

from skipper import torchstore as ts
from skipper.control import shutdown
from skipper.torchstore.algebra.manifest import MeshPosition
from skipper.torchstore.controller.history import History
from skipper.torchstore.controller.index import Index
from skipper.torchstore.controller.version import Contribution
from skipper.torchstore.support.process import ProcessId

_BATCH = 10_000
_SAMPLES = 60
_TIMEOUT_S = 600.0


def names(begin: int, end: int) -> Iterator[str]:
    """Keys as models have them: 1,000 a model, 10 a layer."""
    return (f"model{n // 1000}.layer{n // 10 % 100}.weight{n % 10}" for n in range(begin, end))


def resident() -> int:
    """Bytes of this process that are in memory."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


async def median_us(work: Callable[[int], Awaitable[object]]) -> float:
    """The median of some runs, each with a number of its own."""
    durations = []
    for number in range(_SAMPLES):
        begin = time.perf_counter()
        await work(number)
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations) * 1e6


async def figures(count: int) -> dict[str, float]:
    """What operations cost among so many keys."""
    step = count // _SAMPLES
    there = [next(names(number * step, number * step + 1)) for number in range(_SAMPLES)]
    model = f"model{count // 2000}.layer7."
    found = {
        "put": await median_us(lambda n: ts.put(there[n], n)),
        "put new": await median_us(lambda n: ts.put(f"new.{n}", n)),
        "get": await median_us(lambda n: ts.get(there[n])),
        "exists": await median_us(lambda n: ts.exists(there[n])),
        "keys(prefix), 10 found": await median_us(lambda _: ts.keys(model)),
        "keys(prefix), none found": await median_us(lambda _: ts.keys("nothing.")),
        "delete": await median_us(lambda n: ts.delete(f"new.{n}")),
        "put_batch of 1,000": await median_us(lambda n: ts.put_batch(dict.fromkeys(names(0, 1000), n))),
    }
    assert len(await ts.keys(model)) == 10
    return found


def sweep_us(count: int) -> float:
    """What the index alone needs to look at so many keys when a process dies."""
    process = ProcessId("host", 1, 1)
    index = Index(lambda *_: None, lambda _: None, _ignore)
    for key in names(0, count):
        index.contribute(key, Contribution(process, MeshPosition(), None, None, inline=b"1"), None)
    begin = time.perf_counter()
    index.process_died(ProcessId("host", 2, 2), [])
    return (time.perf_counter() - begin) * 1e6


def _ignore(_history: History) -> None:
    """Nothing is posted."""


async def run(count: int) -> None:
    """Print the table."""
    sizes = [size for size in (1000, 10_000, 100_000, 1_000_000) if size < count] + [count]
    await ts.initialize()
    rows: dict[str, list[float]] = {}
    per_key: list[float] = []
    start, held = resident(), 0
    for size in sizes:
        for begin in range(held, size, _BATCH):
            await ts.put_batch(dict.fromkeys(names(begin, min(begin + _BATCH, size)), begin), timeout=_TIMEOUT_S)
        held = size
        per_key.append((resident() - start) / size)
        for row, figure in (await figures(size)).items():
            rows.setdefault(row, []).append(figure)
        print(f"{size:,} keys: {per_key[-1]:,.0f} bytes a key", flush=True)
    await ts.shutdown()
    for size in sizes:
        rows.setdefault("the death of a process", []).append(sweep_us(size))
    print(f"{'':28}" + "".join(f"{size:>20,}" for size in sizes))
    for row, values in rows.items():
        print(f"{row:28}" + "".join(f"{value:>13,.0f} {value / values[0]:5.1f}x" for value in values))


def main() -> None:
    """Run with the given number of keys."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=100_000, help="keys, at the most")
    options = parser.parse_args()
    if options.count < 1000:
        parser.error("--count is at least 1000")
    try:
        asyncio.run(run(options.count))
    finally:
        shutdown()


if __name__ == "__main__":
    main()
