"""What a user's own file, in no checkout and with no settings, sees of `skipper`: types, and mistakes.

It is copied to an empty folder and checked there. The marked lines are mistakes; nothing else may be reported, so
that a name of unknown type, which would let a mistake pass, is found.
"""

# pyright: strict

from __future__ import annotations

from typing import assert_type

import torch

from skipper import (
    Actor,
    ActorMesh,
    Future,
    HostMesh,
    ProcMesh,
    RDMABuffer,
    ValueMesh,
    dataplane,
    endpoint,
    this_host,
    torchstore,
)
from skipper.control.cluster import jobs


class Trainer(Actor):
    def __init__(self, step: float) -> None:
        self.step = step

    @endpoint
    def train(self, times: int) -> float:
        return self.step * times

    @endpoint
    async def share(self) -> RDMABuffer:
        return RDMABuffer(dataplane.empty(4096))


def actors() -> None:
    assert_type(this_host(), HostMesh)
    procs = this_host().spawn_procs({"gpus": 2})
    assert_type(procs, ProcMesh)
    trainers = procs.spawn("trainers", Trainer, 0.5)
    assert_type(trainers, ActorMesh[Trainer])
    assert_type(trainers.train.call_one(3), Future[float])
    assert_type(trainers.train.call(times=3).get(timeout=1), ValueMesh[float])
    trainers.train.call_one("3")  # error: the type of an argument of an endpoint
    procs.spawn("trainers", Trainer, "fast")  # error: the type of an argument of __init__
    trainers.eval.call_one()  # error: no such endpoint


def memory(trainers: ActorMesh[Trainer]) -> None:
    buffer = trainers.share.call_one().get()
    assert_type(buffer, RDMABuffer)
    buffer.read_into(torch.empty(1024)).get()
    buffer.read_int(1)  # error: no such method


async def store(weights: dict[str, torch.Tensor]) -> None:
    await torchstore.initialize()
    assert_type(await torchstore.put_state_dict(weights, "policy"), int)
    await torchstore.get_state_dict("policy", weights, version="1")  # error: the type of a version
    torchstore.put_state_dicts(weights)  # error: no such function


def rooms() -> None:
    jobs.LocalJob("two")  # error: the type of an argument of a class in a room
