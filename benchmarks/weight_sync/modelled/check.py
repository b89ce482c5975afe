"""The simulation compared with syncs on this host: a few of them give its costs, the others show its error.

Other programs share the host, so the fastest of some syncs counts, on both sides of the comparison.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from skipper import torchstore as ts
from skipper.benchmarks.weight_sync.actors import Generator, Trainer
from skipper.benchmarks.weight_sync.model import Model, fsdp, tensor_parallel
from skipper.benchmarks.weight_sync.modelled.moe import ModelTensor
from skipper.benchmarks.weight_sync.modelled.placement import HeldPart, manifest_of
from skipper.benchmarks.weight_sync.modelled.reads import Planner, ReaderPlan
from skipper.benchmarks.weight_sync.modelled.simulation import ReadFlow, Resource, Simulation
from skipper.benchmarks.weight_sync.sync import measure_syncs
from skipper.control import ProcMesh, this_host
from skipper.torchstore.algebra.layout import Ints, Layout

__all__ = ["Checked", "HostCosts", "Setting", "Way", "check_here"]

Way = Literal["shm", "ucx"]
Engines = Literal["whole", "tensor_parallel"]

_CHUNK_NBYTES = 1 << 20
_TINY = Model(layers=0, hidden=16, vocabulary=16)
_TIMEOUT = timedelta(seconds=60)
_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
_RANKS = 2  # of each side, at most: this benchmark is for hosts of a few cores


@dataclass(frozen=True, slots=True)
class Setting:
    """One kind of sync on this host.

    Attributes:
        trainers: Ranks that hold the model as FSDP cuts it.
        readers: Ranks that read.
        cut: Whether each reader has all of it, or all together by tensor parallelism.
    """

    trainers: int
    readers: int
    cut: Engines

    def describe(self) -> str:
        """For people."""
        each = "each reads all" if self.cut == "whole" and self.readers > 1 else "reads all"
        return f"{self.trainers} → {self.readers}, {'TP' if self.cut == 'tensor_parallel' else each}"


@dataclass(frozen=True, slots=True)
class HostCosts:
    """The costs in the simulation of this host.

    Attributes:
        fixed_s: Seconds of a sync apart from its bytes.
        reader_bytes_per_s: Rate of one reader.
        host_bytes_per_s: Rate of several together.
        op_s: Seconds of a reader for each contiguous stretch.
    """

    fixed_s: float
    reader_bytes_per_s: float
    host_bytes_per_s: float
    op_s: float


@dataclass(frozen=True, slots=True)
class Checked:
    """One sync, measured and modelled.

    Attributes:
        nbytes: Bytes that its readers read together.
        samples_s: As measured.
        modelled_s: As modelled.
        gave_costs: Whether the model's costs come from it, so that it proves nothing.
    """

    way: Way
    setting: Setting
    nbytes: int
    samples_s: Sequence[float]
    modelled_s: float
    gave_costs: bool

    @property
    def error(self) -> float:
        """The model's error, as a share of the fastest sync."""
        return self.modelled_s / min(self.samples_s) - 1


_ONE, _TWO = Setting(1, 1, "whole"), Setting(1, 2, "whole")
_CUT = Setting(1, 2, "tensor_parallel")
SETTINGS = (_ONE, Setting(2, 1, "whole"), _TWO, _CUT, Setting(2, 2, "tensor_parallel"))
_COSTS_FROM = (_ONE, _TWO, _CUT)


async def check_here(ways: Sequence[Way], models: Sequence[Model], iterations: int) -> AsyncIterator[Checked]:
    """Sync models of several sizes in several settings. The costs come from the one in the middle.

    Args:
        ways: How bytes move: through memory that readers map, or by UCX.
        models: From the smallest to the largest.
        iterations: Syncs of each kind.
    """
    given = models[len(models) // 2]
    async with _processes() as (trainers, generators, port):
        runs = _Runs(trainers, generators, port, iterations)
        await runs.measure("shm", SETTINGS[-1], _TINY)  # all ranks of both sides meet once
        for way in ways:
            fixed = min(await runs.measure(way, _ONE, _TINY))
            taken = {setting: await runs.measure(way, setting, given) for setting in _COSTS_FROM}
            costs = _costs(fixed, given, {setting: min(samples) for setting, samples in taken.items()})
            for setting in SETTINGS:
                for model in models:
                    known = model is given and setting in taken
                    samples = taken[setting] if known else await runs.measure(way, setting, model)
                    plans = plans_of(setting, model)
                    modelled = model_here(costs, plans)
                    yield Checked(way, setting, sum(plan.nbytes for plan in plans), samples, modelled, known)


def plans_of(setting: Setting, model: Model) -> list[ReaderPlan]:
    """The plans of the readers of a sync here."""
    sources, shapes = fsdp(model.shapes(), setting.trainers), model.shapes()
    size, cut = setting.trainers, setting.cut == "tensor_parallel"
    manifests = [manifest_of(rank, size, _held(sources, (rank,))) for rank in range(size)]
    whole = {name: Layout(shape) for name, shape in shapes.items()}
    targets = tensor_parallel(shapes, setting.readers) if cut else whole
    places: list[Ints] = [(rank,) if cut else () for rank in range(setting.readers)]
    return [Planner(manifests, list(_held(targets, at))).plan(rank) for rank, at in enumerate(places)]


def model_here(costs: HostCosts, plans: Sequence[ReaderPlan]) -> float:
    """Seconds of a sync, by the simulation."""
    host = Resource("memory of the host", "host", costs.host_bytes_per_s)
    readers = [Resource(f"reader {n}", "reader", costs.reader_bytes_per_s, costs.op_s) for n in range(len(plans))]
    simulation = Simulation([host, *readers], chunk_nbytes=_CHUNK_NBYTES)
    for reader, plan in enumerate(plans):
        for moved in plan.moved.values():
            simulation.begin(ReadFlow(reader, moved.nbytes, moved.runs, (reader + 1, 0)))
    return costs.fixed_s + simulation.run().end_s


def _costs(fixed_s: float, model: Model, taken_s: Mapping[Setting, float]) -> HostCosts:
    one, two, cut = (plans_of(setting, model) for setting in _COSTS_FROM)
    left = {setting: max(taken - fixed_s, 1e-9) for setting, taken in taken_s.items()}
    alone = one[0].nbytes / left[_ONE]
    together = max(sum(plan.nbytes for plan in two) / left[_TWO], alone)
    bare = HostCosts(0.0, alone, together, 0.0)
    op_s = max(left[_CUT] - model_here(bare, cut), 0.0) / max(plan.runs for plan in cut)
    return HostCosts(fixed_s, alone, together, op_s)


def _held(layouts: Mapping[str, Layout], at: Ints) -> Iterator[HeldPart]:
    for name, layout in layouts.items():
        tensor = ModelTensor(name, layout.global_shape, "torch.bfloat16", 0)
        yield HeldPart.of(tensor, layout, at)


@dataclass(slots=True)
class _Runs:
    """Syncs in processes that all of them share."""

    trainers: ProcMesh
    generators: ProcMesh
    port: int
    iterations: int
    _count: int = 0

    async def measure(self, way: Way, setting: Setting, model: Model) -> list[float]:
        """Seconds of each sync."""
        self._count += 1
        key = f"checked-{self._count}"
        ours = self.trainers.slice(gpus=slice(0, setting.trainers))
        theirs = self.generators.slice(gpus=slice(0, setting.readers))
        mapped = way == "shm"
        ranks = setting.readers if setting.cut == "tensor_parallel" else 1
        trainers = ours.spawn(
            "trainer", Trainer, model, "fsdp", setting.trainers, self.port, f"{key}-trainers", mapped, "cpu"
        )
        readers = theirs.spawn(
            "generator", Generator, model, setting.cut, ranks, self.port, f"{key}-readers", False, "cpu"
        )
        try:
            await trainers.initialized
            await readers.initialized
            syncs = await measure_syncs(
                trainers, readers, key=key, mode="direct", iterations=self.iterations, memcpy=False
            )
        finally:
            await trainers.stop()
            await readers.stop()
        return syncs.seconds


@asynccontextmanager
async def _processes() -> AsyncIterator[tuple[ProcMesh, ProcMesh, int]]:
    """The processes of both sides, and the port where their ranks meet."""
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)  # type: ignore[attr-defined]
    trainers, generators = (this_host().spawn_procs(per_host={"gpus": _RANKS}, env=_ENVIRONMENT) for _ in range(2))
    try:
        await ts.initialize()
        try:
            yield trainers, generators, rendezvous.port
        finally:
            await ts.shutdown()
    finally:
        await trainers.stop()
        await generators.stop()
