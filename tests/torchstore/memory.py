"""How much memory the store takes beside the models on both sides, while version after version goes through it.

    python -m tests.torchstore.memory --versions 1000

One publisher and two readers, each with the whole model. Before the first version all of it is allocated and touched,
and a small sync has loaded the code. From then on the memory of all processes is sampled without a pause: what is
private to them, and the shared memory files (memfds) that they hold, each file once. The kernel's proportional sizes
will not do: processes are looked at one after another, and a page that gets a second user in between counts twice.

In snapshot mode a version is assembled while the last one stays readable, so the bound is the model once for each kept
version and once for the one that is being put; in direct mode nothing is copied. Beside that a *bucket* is allowed.
"""

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import torch

from skipper import torchstore as ts
from skipper.control import Actor, ProcMesh, endpoint, shutdown, this_host
from skipper.torchstore.algebra.manifest import Mode

MIB = 1 << 20
BUCKET = 16 * MIB
READERS = 2


class Side(Actor):
    """One process with a model of its own."""

    @endpoint
    async def allocate(self, nbytes: int, share: bool) -> int:
        """Make a model of some twenty tensors, every page of it touched; the process' id."""
        torch.set_num_threads(1)
        model = torch.nn.ParameterDict({f"w{i}": torch.zeros(nbytes // 80, requires_grad=False) for i in range(20)})
        if share:
            ts.share_memory_(model)
        self.model = {name: tensor.detach().fill_(1) for name, tensor in model.items()}
        await self._sync_small()
        return os.getpid()

    async def _sync_small(self) -> None:
        """Have the code loaded, the threads started and the client made, so that they do not count."""
        for mode in get_args(Mode):
            key = f"small {mode} {os.getpid()}"
            for _ in range(3):
                await ts.put_state_dict({"w": torch.ones(100_000)}, key, mode=mode)
                await ts.get_state_dict(key, {"w": torch.zeros(100_000)})
            await ts.delete(key)

    @endpoint
    async def publish(self, mode: Mode, keep: int, number: int) -> None:
        """Change the model and put it."""
        if mode == "direct" and number > 1:
            await ts.fence("model")
        for tensor in self.model.values():
            tensor.fill_(number)
        await ts.put_state_dict(self.model, "model", mode=mode, version=number, keep=keep)

    @endpoint
    async def read(self, number: int) -> bool:
        """Get a version; whether all of it is that version."""
        await ts.get_state_dict("model", self.model, version=number)
        return all(bool((tensor == number).all()) for tensor in self.model.values())


class Sampler:
    """The highest memory of some processes, sampled by a thread.

    Attributes:
        first: Private bytes and bytes of shared memory files, at the start.
        total: The highest sum of both.
        shared: The highest bytes of shared memory files.
        samples: How many were taken.
    """

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.first = self.now()
        self.total, self.shared = sum(self.first), self.first[1]
        self.samples = 0

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def now(self) -> tuple[int, int]:
        """Private bytes and bytes of shared memory files at this moment."""
        files = {(file.st_dev, file.st_ino): file.st_blocks * 512 for pid in self._pids for file in _memfds(pid)}
        return sum(map(_private, self._pids)), sum(files.values())

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            private, shared = self.now()
            self.total, self.shared = max(self.total, private + shared), max(self.shared, shared)
            self.samples += 1


def _private(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Anon:"):  # nothing is forked here: nobody else has these pages
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/smaps_rollup tells no Pss_Anon")


def _memfds(pid: int) -> Iterator[os.stat_result]:
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # closed while we look
            if os.readlink(entry.path).startswith("/memfd:"):
                yield os.stat(entry.path)


async def run(procs: ProcMesh, versions: int, nbytes: int, mode: Mode, keep: int) -> dict[str, Any]:
    """Put and read ``versions`` versions; peaks beside what was there before the first.

    Args:
        procs: The first process publishes, the others read.
        versions: How many.
        nbytes: Of the model.
        mode: Of the puts.
        keep: How many versions are kept.

    Raises:
        ValueError: A version arrived wrong.
    """
    # The volume gets a fresh process: one that has had memory before may have kept it.
    await ts.initialize(strategy=ts.SingletonStrategy())
    sides = procs.spawn("sides", Side)
    try:
        publisher, readers = sides.slice(gpus=0), sides.slice(gpus=slice(1, None))
        (volume,) = (await ts.client()).remote.info.processes.values()
        pids = [
            os.getpid(),
            volume.pid,
            await publisher.allocate.call_one(nbytes, mode == "direct"),
            *await readers.allocate.call(nbytes, False),
        ]
        begin = time.perf_counter()
        with Sampler(pids) as sampler:
            for number in range(1, versions + 1):
                await publisher.publish.call_one(mode, keep, number)
                if not all(await readers.read.call(number)):
                    raise ValueError(f"version {number} arrived wrong")
            last = sampler.now()
        kept = 0 if mode == "direct" else keep + 1
        return {
            "mode": mode,
            "versions": versions,
            "keep": keep,
            "model_mib": nbytes / MIB,
            "bound_mib": (kept * nbytes + BUCKET) / MIB,
            "peak_extra_mib": round((sampler.total - sum(sampler.first)) / MIB, 1),
            "of_it_shared_mib": round((sampler.shared - sampler.first[1]) / MIB, 1),
            "extra_at_the_end_mib": round((sum(last) - sum(sampler.first)) / MIB, 1),
            "samples": sampler.samples,
            "seconds": round(time.perf_counter() - begin, 1),
        }
    finally:
        await ts.shutdown()
        await sides.stop()


async def run_alone(versions: int, nbytes: int, mode: Mode, keep: int) -> dict[str, Any]:
    """`run` in processes of its own."""
    procs = this_host().spawn_procs(per_host={"gpus": 1 + READERS})
    try:
        return await run(procs, versions, nbytes, mode, keep)
    finally:
        await procs.stop()


def main() -> int:
    """Both modes; a line of JSON for each. 1 when one took more than its bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--versions", type=int, default=1000)
    parser.add_argument("--mib", type=int, default=32, help="size of the model")
    options = parser.parse_args()
    too_much = False
    try:
        for mode, keep in (("direct", 1), ("snapshot", 1), ("snapshot", 3)):
            report = asyncio.run(run_alone(options.versions, options.mib * MIB, mode, keep))
            too_much |= report["peak_extra_mib"] > report["bound_mib"]
            print(json.dumps(report), flush=True)
    finally:
        shutdown()
    return int(too_much)


if __name__ == "__main__":
    sys.exit(main())
