"""Actors, a buffer, a store and a tensor engine, beside packages of others that have the bare names of the rooms."""

import asyncio
import sys

import torch

import benchmarks
import control
import dataplane
import tensor_engine as their_engine
import torchstore as their_store
from skipper import Actor, RDMABuffer, endpoint, tensor_engine, this_host, torchstore
from skipper.dataplane import empty_array

THEIRS = {each.__name__: each for each in (benchmarks, control, dataplane, their_engine, their_store)}


class Worker(Actor):
    """One in each process."""

    @endpoint
    def share(self) -> RDMABuffer:
        """A buffer of this process."""
        self._kept = empty_array((4,), "float32")
        self._kept[:] = 3
        return RDMABuffer(self._kept)

    @endpoint
    def fetch(self, buffer: RDMABuffer) -> list[float]:
        """What is in a buffer of another process."""
        mine = torch.empty(4)
        buffer.read_into(mine).get()
        return mine.tolist()

    @endpoint
    def whose(self) -> set[str]:
        """The makers of what this process knows by the bare names."""
        return {sys.modules[name].MAKER for name in THEIRS if name in sys.modules}


async def through_the_store(values: torch.Tensor) -> torch.Tensor:
    """Put and get."""
    await torchstore.initialize()
    await torchstore.put("values", values)
    got = await torchstore.get("values")
    await torchstore.shutdown()
    return got


if __name__ == "__main__":
    assert {each.MAKER for each in THEIRS.values()} == {"somebody else"}
    procs = this_host().spawn_procs({"gpus": 2})
    workers = procs.spawn("workers", Worker)
    buffer = workers.slice(gpus=1).share.call_one().get()
    print(workers.slice(gpus=0).fetch.call_one(buffer).get())
    print(asyncio.run(through_the_store(torch.ones(3))).tolist())
    with procs.activate():
        ranks = torch.ones(2) * procs.rank_tensor("gpus")
    print(tensor_engine.inspect(ranks, gpus=1).tolist())
    for theirs in workers.whose.call().get().values():
        assert theirs <= {"somebody else"}
