"""Rows of all that is measured and modelled, as they stand in a report; each says which of the two it is."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from skipper.benchmarks.report import Reference, Result, Scalar
from skipper.benchmarks.weight_sync.model import Model
from skipper.benchmarks.weight_sync.modelled.check import Checked, Way, check_here
from skipper.benchmarks.weight_sync.modelled.controller import measure_controller
from skipper.benchmarks.weight_sync.modelled.fabric import Hardware
from skipper.benchmarks.weight_sync.modelled.jobs import ModelledJob, PlannedJob, model_sync, plan_job
from skipper.benchmarks.weight_sync.modelled.moe import MoEModel
from skipper.benchmarks.weight_sync.modelled.placement import ReaderMesh, TrainerMesh
from skipper.benchmarks.weight_sync.progress import SyncProgress

__all__ = [
    "CHECK",
    "CONTROLLER",
    "FULL",
    "MEASURED",
    "MODELLED",
    "PLAN",
    "QUICK",
    "SYNC",
    "ModelledWorkload",
    "run_modelled",
]

MEASURED, MODELLED = "measured", "modelled"
PLAN, CONTROLLER, SYNC, CHECK = "plan_compile_s", "controller_s", "sync_1t_s", "sync_here_s"
"""Names of rows: a reader's plan, what the controller does for a sync, a sync on stated hardware, a sync here."""


@dataclass(frozen=True, slots=True)
class ModelledWorkload:
    """What a run does.

    Attributes:
        jobs: Planned and modelled.
        ways: The ways in which syncs run here.
        models: Sizes of those syncs, from the smallest.
        iterations: How many of each of them.
    """

    jobs: Sequence[ModelledJob]
    ways: Sequence[Way]
    models: Sequence[Model]
    iterations: int


_TRAINERS, _MANY_TRAINERS = TrainerMesh(8, 2, 16, 16), TrainerMesh(16, 4, 32, 32)
_SMALL = MoEModel(
    layers=4, hidden=256, intermediate=512, expert_intermediate=128, experts=8, heads=4, query_rank=64,
    key_value_rank=32, head_nope=32, head_rope=16, head_value=32, vocabulary=1024,
)  # fmt: skip

FULL = ModelledWorkload(
    (
        ModelledJob(MoEModel(), _TRAINERS, ReaderMesh(1, 128, 8)),
        ModelledJob(MoEModel(), _TRAINERS, ReaderMesh(4, 32, 8), feed=True),
        ModelledJob(MoEModel(), _MANY_TRAINERS, ReaderMesh(8, 64, 8), ()),
    ),
    ("shm", "ucx"),
    tuple(Model(layers=layers, vocabulary=vocabulary) for layers, vocabulary in ((1, 4096), (3, 16_384), (8, 16_384))),
    6,
)
QUICK = ModelledWorkload(
    (ModelledJob(_SMALL, TrainerMesh(2, 2, 2, 2), ReaderMesh(2, 4, 2), (1.0,), feed=True),),
    ("shm",),
    (Model(layers=1, vocabulary=1024), Model(layers=2, vocabulary=2048)),
    2,
)


async def run_modelled(workload: ModelledWorkload, progress: SyncProgress) -> AsyncIterator[Result]:
    """Measure and model everything; rows come as soon as they are known."""
    for job in workload.jobs:
        progress.stage(f"planning {_meshes(job)}, {job.model.precision}")
        planned = plan_job(job)
        for row in (*_plan_rows(planned), *_controller_rows(planned)):
            yield row
        progress.stage(f"modelling {_meshes(job)}, {job.model.precision}")
        for row in _sync_rows(planned):
            yield row
    progress.stage("syncs on this host")
    async for checked in check_here(workload.ways, workload.models, workload.iterations):
        yield _check_row(checked)


def _meshes(job: ModelledJob) -> str:
    return f"{job.trainers.size} → {job.readers.size}"


def _about(planned: PlannedJob, label: str) -> dict[str, Scalar]:
    job = planned.job
    return {
        "label": label,
        "job": _meshes(job),
        "trainers": job.trainers.describe(),
        "readers": job.readers.describe(),
        "precision": job.model.precision,
        "tensors": planned.tensors,
        "model_nbytes": planned.model_nbytes,
    }


def _plan_rows(planned: PlannedJob) -> Iterator[Result]:
    largest = max(planned.plans, key=lambda plan: plan.nbytes)
    index_s = statistics.median(planned.index_s)
    about: dict[str, Scalar] = {
        **_about(planned, MEASURED),
        "index_s": index_s,
        "sources": len(largest.moved),
        "filled": largest.tensors,
        "nbytes": largest.nbytes,
        "runs": largest.runs,
        "named": sum(len(manifest.tensors) for manifest in planned.manifests),
    }
    yield Result.from_samples(PLAN, "s", [index_s + plan_s for plan_s in planned.plan_s], parameters=about)


def _controller_rows(planned: PlannedJob) -> Iterator[Result]:
    cost, readers = measure_controller(planned.manifests), planned.job.readers.size
    about: dict[str, Scalar] = {
        **_about(planned, MEASURED),
        "first_publish_s": cost.first_publish_s,
        "publish_s": cost.publish_s,
        "read_s": cost.read_s,
        "first_nbytes": cost.first_nbytes,
        "grant_nbytes": cost.grant_nbytes,
        "request_nbytes": cost.request_nbytes,
    }
    yield Result.single(CONTROLLER, "s", cost.publish_s + readers * cost.read_s, parameters=about)


def _sync_rows(planned: PlannedJob) -> Iterator[Result]:
    for oversubscription in planned.job.oversubscriptions:
        for feed in (False, True) if planned.job.feed else (False,):
            hardware = Hardware(oversubscription=oversubscription)
            found = model_sync(planned, hardware, feed=feed)
            about: dict[str, Scalar] = {
                **_about(planned, MODELLED),
                "oversubscription": oversubscription,
                "feed": feed,
                "low_s": found.low_s,
                "limit": found.limit,
                "nbytes": planned.nbytes,
            }
            yield Result.single(SYNC, "s", found.high_s, parameters=about)


def _check_row(checked: Checked) -> Result:
    about: dict[str, Scalar] = {
        "label": MEASURED,
        "way": checked.way,
        "setting": checked.setting.describe(),
        "nbytes": checked.nbytes,
        "fastest_s": min(checked.samples_s),
        "modelled_s": checked.modelled_s,
        "error": checked.error,
        "gave_costs": checked.gave_costs,
    }
    reference = Reference(MODELLED, checked.modelled_s)
    return Result.from_samples(CHECK, "s", checked.samples_s, reference=reference, parameters=about)
