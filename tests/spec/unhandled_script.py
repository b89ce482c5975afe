"""A failure that its handler does not handle, and so nobody does. Prints the pid of the process with the handler."""

import os
import time

from skipper.control import Actor, MeshFailure, ProcMesh, endpoint, this_host


class Worker(Actor):
    @endpoint
    def fail(self) -> None:
        raise ValueError("the first error")


class Manager(Actor):
    def __init__(self, worker_procs: ProcMesh) -> None:
        self.workers = worker_procs.spawn("workers", Worker)

    def __supervise__(self, failure: MeshFailure) -> bool:
        raise KeyError("a later error")

    @endpoint
    def provoke(self) -> int:
        self.workers.slice(gpus=1).fail.broadcast()
        return os.getpid()


if __name__ == "__main__":
    manager = this_host().spawn_procs().spawn("manager", Manager, this_host().spawn_procs({"gpus": 2}))
    print(manager.provoke.call_one().get(), flush=True)
    time.sleep(30)
