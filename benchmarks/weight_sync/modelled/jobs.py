"""The jobs that are planned and modelled: their meshes, their plans, and how long a sync takes on stated hardware."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from skipper.benchmarks.weight_sync.modelled.fabric import Fabric, Hardware
from skipper.benchmarks.weight_sync.modelled.fan_out import FanOut
from skipper.benchmarks.weight_sync.modelled.moe import MoEModel
from skipper.benchmarks.weight_sync.modelled.placement import ReaderMesh, TrainerMesh, manifest_of
from skipper.benchmarks.weight_sync.modelled.reads import Planner, ReaderPlan
from skipper.benchmarks.weight_sync.modelled.simulation import ReadFlow, SimulatedRun, Simulation, bound_s
from skipper.torchstore.algebra.manifest import Manifest

__all__ = ["ModelledJob", "ModelledSync", "PlannedJob", "model_sync", "plan_job"]

_MOST_CHUNKS = 60_000
_LEAST_CHUNK_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelledJob:
    """One model, its publishers and its readers.

    Attributes:
        oversubscriptions: Oversubscriptions of the leaf switches with which it is modelled.
        feed: Whether it is modelled with readers that feed readers as well.
    """

    model: MoEModel
    trainers: TrainerMesh
    readers: ReaderMesh
    oversubscriptions: tuple[float, ...] = (1.0, 4.0)
    feed: bool = False


@dataclass(slots=True)
class PlannedJob:
    """The plans of all readers of a job.

    Attributes:
        job: Which one.
        manifests: Manifests of its trainers.
        plans: Plans by reader.
        tensors: Number of tensors of the model.
        model_nbytes: Size of the model.
        index_s: Processor time in which one reader finds who holds its tensors; for each rank of an engine.
        plan_s: Processor time in which it then plans its read; for each reader.
    """

    job: ModelledJob
    manifests: Sequence[Manifest]
    tensors: int
    model_nbytes: int
    plans: list[ReaderPlan] = field(default_factory=list)
    index_s: list[float] = field(default_factory=list)
    plan_s: list[float] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that all readers read together."""
        return sum(plan.nbytes for plan in self.plans)


@dataclass(frozen=True, slots=True)
class ModelledSync:
    """How long moving the bytes of one sync takes.

    Attributes:
        low_s: At the full rates, with the work spread perfectly: no schedule is faster. Where readers feed readers, by
            the simulation at the full rates.
        high_s: By the simulation, at the stated share of the rates that payload gets.
        limit: What limits ``low_s``.
        outcome: Result of the simulation.
    """

    low_s: float
    high_s: float
    limit: str
    outcome: SimulatedRun


def plan_job(job: ModelledJob, *, engine_ranks: Sequence[int] | None = None) -> PlannedJob:
    """Plan the reads of a job: each reader for itself, from the manifests of all trainers.

    Args:
        job: Which one.
        engine_ranks: Plan only for these ranks of an engine, and for the first engine only; None: for all readers.

    Raises:
        BenchmarkError: The trainers do not hold the whole model.
    """
    model, trainers, readers = job.model, job.trainers, job.readers
    tensors = list(model.tensors())
    dealt = trainers.deal(tensors, model.layers, model.experts)
    manifests = [manifest_of(rank, trainers.size, trainers.held(rank, dealt)) for rank in range(trainers.size)]
    planned = PlannedJob(job, manifests, len(tensors), sum(tensor.nbytes for tensor in tensors))
    plans: dict[int, ReaderPlan] = {}
    for place in range(readers.expert) if engine_ranks is None else engine_ranks:
        held = list(readers.held(place, tensors, model.experts))
        begin = time.process_time()
        planner = Planner(manifests, held)
        planned.index_s.append(time.process_time() - begin)
        for engine in range(readers.engines if engine_ranks is None else 1):
            reader = engine * readers.expert + place
            begin = time.process_time()
            plans[reader] = planner.plan(reader)
            planned.plan_s.append(time.process_time() - begin)
    planned.plans = [plans[reader] for reader in sorted(plans)]
    return planned


def model_sync(planned: PlannedJob, hardware: Hardware, *, feed: bool = False) -> ModelledSync:
    """Model the transfers of a job whose plans are all there.

    Args:
        planned: The plans.
        hardware: On what.
        feed: Whether readers of the same tensors feed each other, as with ``serve=True``.
    """
    real = _simulated(planned, hardware, hardware.efficiency, feed)
    if feed:  # the order of reads depends on which readers have ended
        ideal = _simulated(planned, hardware, 1.0, feed)
        busiest = max(range(len(ideal.served_s)), key=ideal.served_s.__getitem__)
        return ModelledSync(ideal.end_s, real.end_s, _fabric(planned, hardware).resources[busiest].kind, real)
    fabric = _fabric(planned, hardware)
    low_s, limit = bound_s(fabric.resources, list(_flows(planned, fabric)))
    return ModelledSync(low_s, real.end_s, limit.kind, real)


def _simulated(planned: PlannedJob, hardware: Hardware, share: float, feed: bool) -> SimulatedRun:
    fabric = _fabric(planned, hardware, share)
    chunk = max(planned.nbytes // _MOST_CHUNKS, _LEAST_CHUNK_NBYTES)
    simulation = Simulation(fabric.resources, chunk_nbytes=chunk)
    if feed:
        FanOut(simulation, fabric, planned.plans, planned.job.readers.expert).begin()
    else:
        for flow in _flows(planned, fabric):
            simulation.begin(flow)
    return simulation.run()


def _fabric(planned: PlannedJob, hardware: Hardware, share: float = 1.0) -> Fabric:
    return Fabric(hardware, planned.job.trainers.size, planned.job.readers.size, share)


def _flows(planned: PlannedJob, fabric: Fabric) -> Iterator[ReadFlow]:
    for reader, plan in enumerate(planned.plans):
        for publisher, moved in plan.moved.items():
            yield fabric.flow(publisher, reader, moved.nbytes, moved.runs)
