"""A job that goes on while its processes are killed."""

import asyncio
import os
import signal

from skipper import Actor, MeshFailure, SupervisionError, current_rank, endpoint, this_host
from skipper.control import ActorMesh, HostMesh, ProcMesh, this_proc
from skipper.control.cluster.recovery import Recoverable, RecoveryPolicy, Restart


class Worker(Actor):
    def __init__(self, done: int = 0) -> None:
        self.done = done  # in a real job: weights and an optimizer

    @endpoint
    def step(self, killed: int | None = None) -> int:
        if current_rank().rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)  # what the kernel does when memory runs out
        self.done += 1
        return self.done

    @endpoint
    def steps_done(self) -> int:
        return self.done


procs = this_host().spawn_procs({"gpus": 3})
workers = procs.spawn("workers", Worker)
print("step:", workers.step.call().get())

try:
    workers.step.call(killed=1).get()
except SupervisionError as error:
    print("the step failed:", error)
print("ranks lost:", procs.lost())
print("rank 0 has done", workers.slice(gpus=0).steps_done.call_one().get(), "steps")

done = workers.slice(gpus=0).steps_done.call_one().get()
procs = procs.with_successors({1: this_host().spawn_procs()})
workers = workers.with_successors(procs, done)
print("step:", workers.step.call().get())


class Owner(Actor):
    def __init__(self) -> None:
        self.done = 0
        policy = RecoveryPolicy(process=Restart(attempts=3, within_s=60.0, backoff_s=0.1))
        self.crew = Recoverable("crew", self.start, policy)

    def start(self, hosts: HostMesh, name: str) -> tuple[ProcMesh, ActorMesh[Worker]]:
        procs = hosts.spawn_procs({"gpus": 3}, name=name)
        return procs, procs.spawn(name, Worker, self.done)

    async def __supervise__(self, failure: MeshFailure) -> bool:
        return self.crew.supervise(failure)

    @endpoint
    async def train(self, steps: int, kills: dict[int, int]) -> str:
        while self.done < steps:
            workers = self.crew.actors
            if workers is None:  # the next processes are being started
                await asyncio.sleep(0.01)
                continue
            try:
                self.done = max(await workers.step.call(kills.pop(self.done, None)))
            except SupervisionError:
                await asyncio.sleep(0.01)  # __supervise__ hears of it, too
        return f"{self.done} steps done, started again {self.crew.life} times"


owner = this_proc().spawn("owner", Owner)
print(owner.train.call_one(10, {3: 0, 6: 2}).get(timeout=60))
