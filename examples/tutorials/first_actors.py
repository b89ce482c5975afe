"""Two actors: call them, let one fail, replace it."""

import os

from skipper import Actor, SupervisionError, current_rank, endpoint, this_host
from skipper.control import ActorError


class Counter(Actor):
    def __init__(self, start: int) -> None:
        self.value = start

    @endpoint
    def add(self, amount: int) -> int:
        if amount < 0:
            raise ValueError("a counter only goes up")
        self.value += amount
        return self.value

    @endpoint
    def where(self) -> str:
        return f"rank {current_rank().rank} in process {os.getpid()}"

    @endpoint
    def crash(self) -> None:
        os._exit(1)


procs = this_host().spawn_procs({"gpus": 2})
counters = procs.spawn("counters", Counter, 10)
for line in counters.where.call().get():
    print(line)

print(counters.add.call(1).get())
print(counters.slice(gpus=1).add.call_one(5).get())
print(counters.add.call(0).get())

try:
    counters.slice(gpus=0).add.call_one(-1).get()
except ActorError as error:
    print("the endpoint raised:", error.cause)
print(counters.slice(gpus=0).add.call_one(1).get())

try:
    counters.slice(gpus=1).crash.call_one().get()
except SupervisionError as error:
    print("lost:", error)
print("ranks lost:", procs.lost())
print("rank 0 lives on:", counters.slice(gpus=0).add.call_one(0).get())

procs = procs.with_successors({1: this_host().spawn_procs()})
counters = counters.with_successors(procs, 100)
print(counters.add.call(0).get())
