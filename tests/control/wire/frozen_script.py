"""Notices that it was frozen, and then calls its processes. Prints the pid of the first one at the beginning."""

import os
import time

from skipper import control
from skipper.control import Actor, ActorMesh, endpoint, this_host


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def grow(self) -> ActorMesh["Worker"]:
        self.procs = this_host().spawn_procs()
        return self.procs.spawn("below", Worker)


if __name__ == "__main__":
    control.configure(heartbeat_s=2)
    worker = this_host().spawn_procs().spawn("worker", Worker)
    below = worker.grow.call_one().get()
    pids = [one.pid.call_one().get() for one in (worker, below)]
    last = time.monotonic()
    print(pids[0], flush=True)
    while (now := time.monotonic()) - last < 2:
        last = now
        time.sleep(0.01)
    print("awake", flush=True)
    print([one.pid.call_one().get() for one in (worker, below)] == pids)
