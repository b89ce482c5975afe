"""The parts of a run, one after another. Each starts its actors in processes that serve all parts, and stops them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from skipper import torchstore as ts
from skipper.benchmarks.report import Reference, Result, Scalar
from skipper.benchmarks.weight_sync.actors import DTYPE, Client, Cut, EchoActor, Generator, Trainer
from skipper.benchmarks.weight_sync.model import Model, Tensors
from skipper.benchmarks.weight_sync.planning import measure_planning
from skipper.benchmarks.weight_sync.progress import SyncProgress
from skipper.benchmarks.weight_sync.sync import Syncs, measure_syncs, measure_wake_ups
from skipper.control import Actor, ActorMesh, ProcMesh, get_or_spawn_controller, this_host
from skipper.control.runtime import progress_reports
from skipper.torchstore.algebra.manifest import Mode

__all__ = ["SyncWorkload", "run"]

_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    progress_reports.VARIABLE: progress_reports.OFF,  # what is measured is the same on a terminal and on a pipe
}
_TIMEOUT = timedelta(seconds=60)
_TINY = Model(layers=0, hidden=16, vocabulary=16)  # two tensors: what counts is latency, not bandwidth

A = TypeVar("A", bound=Actor)
_Job = tuple[ActorMesh[Trainer], ActorMesh[Generator]]


@dataclass(frozen=True, slots=True)
class _Processes:
    """The processes in which the actors of all parts run: loading torch takes too long to start them for each part.

    Attributes:
        port: Port of the TCPStore on loopback where the ranks of a side meet.
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
        generators: Engines that read all of it, each.
        tensor_parallel: Ranks of each engine, over which it is sharded.
        readers: How many read the whole of a smaller model at once; to compare, one reads it alone.
        iterations: Measured syncs of each kind.
        rounds: Rounds of 20 small puts, gets and calls each.
        wake_ups: Measured wake-ups.
        plan_tensors: Tensors of the job whose plan is made.
        plan_ranks: That job's trainers and generators.
        device: Where the weights are, at both ends: "cpu" or "cuda".
        backend: Backend of the data plane that moves them.
        modes: The modes in which they are put.
        only_syncs: Whether only syncs of whole models are measured.
    """

    model: Tensors
    trainers: int
    generators: int
    tensor_parallel: int
    readers: int
    iterations: int
    rounds: int
    wake_ups: int
    plan_tensors: int
    plan_ranks: tuple[int, int]
    device: str = "cpu"
    backend: str = "auto"
    modes: tuple[Mode, ...] = ("direct", "snapshot")
    only_syncs: bool = False

    @property
    def generator_ranks(self) -> int:
        """Ranks of all engines together."""
        return self.generators * self.tensor_parallel

    def smaller_model(self) -> Model:
        """A fraction of the model, small enough that every reader can hold all of it."""
        if not isinstance(self.model, Model):
            raise TypeError("only the model of this benchmark has a smaller one")
        return replace(self.model, layers=max(1, self.model.layers // 6), vocabulary=self.model.vocabulary // 16)

    def most_nbytes(self) -> int:
        """Bytes that the syncs of whole models need at once."""
        whole = self.model.numel() * DTYPE.itemsize
        read = whole * self.generators
        kept = 2 * whole if "snapshot" in self.modes else 0  # one version is written while another one is read
        return whole + read + kept + 2 * read  # source and destination of the memcpy


async def run(workload: SyncWorkload, progress: SyncProgress) -> AsyncIterator[Result]:
    """Measure everything; rows come as soon as they are known."""
    progress.stage(f"starting {workload.trainers + workload.generator_ranks} processes")
    async with _processes(workload) as processes:
        await ts.initialize()
        try:
            for mode in workload.modes:
                for row in await _syncs(processes, workload, mode, progress):
                    yield row
            if workload.only_syncs:
                return
            progress.stage("many readers")
            yield await _readers(processes, workload)
            progress.stage("small values")
            yield await _wake_ups(processes, workload)
            for row in await _small(processes, workload):
                yield row
        finally:
            await ts.shutdown()
    progress.stage("plans of a large job")
    for row in _plans(workload):
        yield row


async def _syncs(processes: _Processes, workload: SyncWorkload, mode: Mode, progress: SyncProgress) -> list[Result]:
    """A whole model from trainers to generators, each side with its own sharding."""
    sizes = (workload.trainers, workload.generator_ranks)
    progress.stage("making the weights")
    async with _job(processes, workload, workload.model, *sizes, "tensor_parallel", mode) as (ours, theirs):
        syncs = await measure_syncs(
            ours,
            theirs,
            key=mode,
            mode=mode,
            iterations=workload.iterations,
            device=workload.device,
            progress=progress,
        )
    where: dict[str, Scalar] = {
        "nbytes": syncs.nbytes,
        "tensors": len(workload.model.shapes()),
        "trainers": workload.trainers,
        "generators": workload.generators,
        "tensor_parallel": workload.tensor_parallel,
    }
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
    """Many readers of one version compared with one reader: seconds for each byte that they read together."""
    per_gb: dict[int, Syncs] = {}
    for readers in (1, workload.readers):
        async with _job(processes, workload, workload.smaller_model(), 1, readers, "whole", "direct") as (
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
    """64 bytes put and got by another process than the controller's, and a call to the controller's process."""
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
    readers = 0 if workload.only_syncs else workload.readers
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)  # type: ignore[attr-defined]
    sizes = (workload.trainers, max(workload.generator_ranks, readers))
    trainers, generators = (this_host().spawn_procs(per_host={"gpus": size}, env=_ENVIRONMENT) for size in sizes)
    try:
        yield _Processes(trainers, generators, rendezvous.port)
    finally:
        await trainers.stop()
        await generators.stop()


@asynccontextmanager
async def _job(
    processes: _Processes, workload: SyncWorkload, model: Tensors, trainers: int, generators: int, cut: Cut, mode: Mode
) -> AsyncIterator[_Job]:
    """Trainers and generators; in direct mode readers can map the trainers' memory."""
    port, device, backend = processes.port, workload.device, workload.backend
    ours_ = (model, "fsdp", trainers, port, "trainers", mode == "direct", device, backend)
    ranks = workload.tensor_parallel if cut == "tensor_parallel" else 1
    theirs_ = (model, cut, ranks, port, "generators", False, device, backend)
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
