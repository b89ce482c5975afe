"""The parts of a run, one after another. Each starts its actors in processes that serve all parts, and stops them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from skipper import torchstore as ts
from skipper.benchmarks.report import Reference, Result
from skipper.benchmarks.weight_sync.actors import Client, Cut, EchoActor, Generator, Trainer
from skipper.benchmarks.weight_sync.model import Model
from skipper.benchmarks.weight_sync.planning import measure_planning
from skipper.benchmarks.weight_sync.sync import Syncs, measure_syncs, measure_wake_ups
from skipper.control import Actor, ActorMesh, ProcMesh, get_or_spawn_controller, this_host
from skipper.torchstore.algebra.manifest import Mode

__all__ = ["SyncWorkload", "run"]

_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
_TIMEOUT = timedelta(seconds=60)
_TINY = Model(layers=0, hidden=16, vocabulary=16)  # two tensors: the time of the way counts, not of the bytes

A = TypeVar("A", bound=Actor)
_Job = tuple[ActorMesh[Trainer], ActorMesh[Generator]]


@dataclass(frozen=True, slots=True)
class _Processes:
    """The processes in which the actors of all parts run: loading torch takes too long to start them for each part.

    Attributes:
        port: Of the TCPStore on loopback where the ranks of a side meet.
    """

    trainers: ProcMesh
    generators: ProcMesh
    port: int


@dataclass(frozen=True, slots=True)
class SyncWorkload:
    """What a run does.

    Attributes:
        model: What the syncs move.
        trainers: Ranks that publish it, sharded as FSDP does.
        generators: Ranks that read it, sharded as tensor parallelism does.
        readers: How many read the whole of a smaller model at once, beside one that does so alone.
        iterations: Measured syncs of each kind.
        rounds: Of 20 small puts, gets and calls each.
        wake_ups: Measured wake-ups.
        plan_tensors: Tensors of the job whose plan is made.
        plan_ranks: That job's trainers and generators.
        device: Where the weights lie, at both ends: "cpu" or "cuda".
    """

    model: Model
    trainers: int
    generators: int
    readers: int
    iterations: int
    rounds: int
    wake_ups: int
    plan_tensors: int
    plan_ranks: tuple[int, int]
    device: str = "cpu"

    @property
    def smaller_model(self) -> Model:
        """A fraction of the model, small enough that every reader can hold all of it."""
        return replace(self.model, layers=max(1, self.model.layers // 6), vocabulary=self.model.vocabulary // 16)


async def run(workload: SyncWorkload) -> AsyncIterator[Result]:
    """Measure everything; rows come as soon as they are known."""
    async with _processes(workload) as processes:
        await ts.initialize()
        try:
            for row in await _syncs(processes, workload, "direct"):
                yield row
            for row in await _syncs(processes, workload, "snapshot"):
                yield row
            yield await _readers(processes, workload)
            yield await _wake_ups(processes, workload)
            for row in await _small(processes, workload):
                yield row
        finally:
            await ts.shutdown()
    for row in _plans(workload):
        yield row


async def _syncs(processes: _Processes, workload: SyncWorkload, mode: Mode) -> list[Result]:
    """A whole model from trainers to generators, each side with its own sharding."""
    sizes = (workload.trainers, workload.generators)
    async with _job(processes, workload, workload.model, *sizes, "tensor_parallel", mode) as (ours, theirs):
        iterations, device = workload.iterations, workload.device
        syncs = await measure_syncs(ours, theirs, key=mode, mode=mode, iterations=iterations, device=device)
    where = {"nbytes": syncs.nbytes, "tensors": len(workload.model.shapes())}
    copy = "memcpy" if workload.device == "cpu" else "copy on the device"
    memcpy = Result.from_samples(copy, "s", syncs.memcpy_s).as_reference()
    rows = [Result.from_samples(f"sync_{mode}", "s", syncs.seconds, reference=memcpy, parameters=where)]
    if mode == "direct":
        records = [pull.record for pull in syncs.pulls]
        moved = [sum(record.nbytes for record in records) / len(syncs.seconds) / syncs.nbytes]
        calls = [float(record.control_calls) for record in records]
        rows += [
            Result.from_samples("wire_amplification", "x", moved, parameters=where),
            Result.from_samples("control_rpcs_per_sync", "messages", calls, parameters=where),
        ]
    return rows


async def _readers(processes: _Processes, workload: SyncWorkload) -> Result:
    """Many readers of one version beside one reader: seconds for each byte that they read together."""
    per_gb: dict[int, Syncs] = {}
    for readers in (1, workload.readers):
        async with _job(processes, workload, workload.smaller_model, 1, readers, "whole", "direct") as (
            trainers,
            generators,
        ):
            per_gb[readers] = await measure_syncs(
                trainers, generators, key="whole", mode="direct", iterations=2 * workload.iterations, memcpy=False
            )
    one, many = (
        Result.from_samples("s_per_gb", "s/GB", [s / syncs.nbytes * 1e9 for s in syncs.seconds])
        for syncs in per_gb.values()
    )
    return replace(
        many,
        name=f"readers_{workload.readers}_vs_1",
        reference=Reference("one reader", one.value),
        parameters={"nbytes": per_gb[workload.readers].nbytes, "readers": workload.readers},
    )


async def _wake_ups(processes: _Processes, workload: SyncWorkload) -> Result:
    async with _job(processes, workload, _TINY, 1, 1, "whole", "direct") as (trainers, generators):
        taken_ms = await measure_wake_ups(trainers, generators, key="tiny", iterations=workload.wake_ups)
    row = Result.from_samples("newer_than_wake_ms", "ms", taken_ms)
    return Result.single("newer_than_wake_p99_ms", "ms", row.p99, parameters={"wake_ups": row.n, "p50_ms": row.p50})


async def _small(processes: _Processes, workload: SyncWorkload) -> list[Result]:
    """64 bytes put and got by a process that is not the controller's, beside a call to the controller's process."""
    async with _spawned(processes.generators, 1, Client) as client:
        echo = await get_or_spawn_controller("weight-sync-echo", EchoActor)
        taken_us = await client.measure.call_one(echo, workload.rounds)
    call = Result.from_samples("call_one", "us", taken_us["call_one"]).as_reference()
    return [
        Result.from_samples(f"{name}_64B_p50_us", "us", taken_us[name], reference=call, parameters={"nbytes": 64})
        for name in ("put", "get")
    ]


def _plans(workload: SyncWorkload) -> Iterator[Result]:
    """The plan of one reader of a large job, made in this process: the number of processes does not change it."""
    sources, readers = workload.plan_ranks
    planned = measure_planning(
        tensors=workload.plan_tensors, sources=sources, readers=readers, iterations=min(3, workload.iterations)
    )
    where = {"tensors": planned.tensors, "sources": sources, "readers": readers, "segments": planned.segments}
    yield Result.from_samples("plan_compile_s", "s", planned.compile_s, parameters=where)
    yield Result.from_samples("plan_replay_us_per_op", "us", planned.replay_us, parameters=where)


@asynccontextmanager
async def _processes(workload: SyncWorkload) -> AsyncIterator[_Processes]:
    """As many processes as the largest part needs."""
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)  # type: ignore[attr-defined]
    sizes = (workload.trainers, max(workload.generators, workload.readers))
    trainers, generators = (this_host().spawn_procs(per_host={"gpus": size}, env=_ENVIRONMENT) for size in sizes)
    try:
        yield _Processes(trainers, generators, rendezvous.port)
    finally:
        await trainers.stop()
        await generators.stop()


@asynccontextmanager
async def _job(
    processes: _Processes, workload: SyncWorkload, model: Model, trainers: int, generators: int, cut: Cut, mode: Mode
) -> AsyncIterator[_Job]:
    """Trainers and generators; in direct mode readers can map the trainers' memory."""
    port, device = processes.port, workload.device
    ours_ = (model, "fsdp", port, "trainers", mode == "direct", device)
    theirs_ = (model, cut, port, "generators", False, device)
    async with (
        _spawned(processes.trainers, trainers, Trainer, *ours_) as ours,
        _spawned(processes.generators, generators, Generator, *theirs_) as theirs,
    ):
        yield ours, theirs


@asynccontextmanager
async def _spawned(procs: ProcMesh, size: int, cls: type[A], *args: Any) -> AsyncIterator[ActorMesh[A]]:
    """Actors in the first ``size`` processes."""
    mesh = procs.slice(gpus=slice(0, size)).spawn(cls.__name__.lower(), cls, *args)
    try:
        await mesh.initialized
        yield mesh
    finally:
        await mesh.stop()
