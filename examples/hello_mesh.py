"""The first minute: two processes, one actor in each, and memory that one reads from the other."""

import numpy as np

from skipper import Actor, RDMABuffer, context, endpoint, this_host
from skipper.dataplane import empty_array


class Worker(Actor):
    """One in each process; it owns four numbers that the others may read."""

    def __init__(self) -> None:
        weights = empty_array((4,), "float32")  # memory that other processes of this host can map
        weights[:] = context().actor_instance.rank.rank
        self.buffer = RDMABuffer(weights)

    @endpoint
    def share(self) -> RDMABuffer:
        """Pass on a handle; the numbers themselves stay where they are."""
        return self.buffer

    @endpoint
    def fetch(self, buffer: RDMABuffer) -> list[float]:
        """Read the memory behind a handle; its owner's Python takes no part."""
        mine = np.empty(4, dtype="float32")
        buffer.read_into(mine).get()
        return mine.tolist()


if __name__ == "__main__":
    workers = this_host().spawn_procs({"gpus": 2}).spawn("workers", Worker)
    buffer = workers.slice(gpus=1).share.call_one().get()
    print("worker 0 reads from worker 1:", workers.slice(gpus=0).fetch.call_one(buffer).get())
