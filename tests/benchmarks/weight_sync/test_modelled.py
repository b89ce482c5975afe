"""Plans from shapes alone, and the model that they feed."""

from collections import Counter
from math import prod
from pathlib import Path

import numpy as np
import pytest

from skipper.benchmarks.errors import BenchmarkError
from skipper.benchmarks.report import Report, Result
from skipper.benchmarks.weight_sync.command import main
from skipper.benchmarks.weight_sync.modelled.controller import measure_controller
from skipper.benchmarks.weight_sync.modelled.fabric import Hardware
from skipper.benchmarks.weight_sync.modelled.jobs import PlannedJob, model_sync, plan_job
from skipper.benchmarks.weight_sync.modelled.moe import ModelTensor, MoEModel
from skipper.benchmarks.weight_sync.modelled.page import section
from skipper.benchmarks.weight_sync.modelled.placement import ReaderMesh, TrainerMesh, manifest_of
from skipper.benchmarks.weight_sync.modelled.reads import Planner
from skipper.benchmarks.weight_sync.modelled.rows import CHECK, CONTROLLER, PLAN, QUICK, SYNC
from skipper.torchstore.algebra.layout import minus, plus, uncovered
from skipper.torchstore.algebra.matching import SourceTensors
from tests.benchmarks.quick import ROOT, quick_run

JOB = QUICK.jobs[0]
TENSORS = list(JOB.model.tensors())


@pytest.fixture(scope="module")
def planned() -> PlannedJob:
    return plan_job(JOB)


def test_the_model_has_a_trillion_parameters_in_a_hundred_thousand_tensors() -> None:
    tensors = list(MoEModel().tensors())
    elements = sum(prod(tensor.shape) for tensor in tensors if not tensor.name.endswith("_scale_inv"))
    assert 1.02e12 < elements < 1.03e12
    assert len(tensors) == len({tensor.name for tensor in tensors}) == 139_583


def test_the_trainers_hold_the_whole_model_and_each_box_once() -> None:
    trainers = JOB.trainers
    boxes: dict[str, list[object]] = {tensor.name: [] for tensor in TENSORS}
    dealt = trainers.deal(TENSORS, JOB.model.layers, JOB.model.experts)
    for rank in range(trainers.size):
        for part in trainers.held(rank, dealt):
            boxes[part.tensor.name] += [piece.box for piece in part.pieces]
    for tensor in TENSORS:
        assert uncovered(tensor.shape, frozenset(boxes[tensor.name])) == ()  # type: ignore[arg-type]
        copies = Counter(boxes[tensor.name]).values()
        is_cut = tensor.expert is not None or tensor.parallel_dim is not None
        assert set(copies) == ({1} if is_cut else {trainers.tensor})


def test_every_reader_reads_each_byte_that_it_needs_once(planned: PlannedJob) -> None:
    assert len(planned.plans) == JOB.readers.size
    for plan in planned.plans:
        assert plan.nbytes == plan.needed
    assert planned.nbytes >= JOB.readers.engines * planned.model_nbytes


@pytest.mark.parametrize("place", range(JOB.readers.expert))
def test_the_plan_of_one_rank_is_its_part_of_a_plan_of_the_whole_job(planned: PlannedJob, place: int) -> None:
    """The plan of the whole: who owns each element, by a map of all elements of the tensor."""
    held = list(JOB.readers.held(place, TENSORS, JOB.model.experts))
    tensors = SourceTensors(planned.manifests, [part.tensor.name for part in held])
    for position, part in enumerate(held):
        name = part.tensor.name
        holders = _holders(planned, part.tensor)
        found = tensors.find(name, part.pieces, place + position)
        read = np.zeros(part.tensor.shape, int)
        for transfer in found.transfers:
            index, item = tensors.holders(name)[transfer.source]
            _, source = item.piece_at(transfer.source_local)
            start = plus(source.box.offsets, minus(transfer.source_local, source.local))
            place_of = tuple(slice(at, at + size) for at, size in zip(start, transfer.shape, strict=True))
            assert holders[index][place_of].all()  # this publisher has them
            read[place_of] += 1
        wanted = np.zeros(part.tensor.shape, int)
        for piece in part.pieces:
            wanted[tuple(slice(o, o + s) for o, s in zip(piece.box.offsets, piece.box.shape, strict=True))] = 1
        assert np.array_equal(read, wanted)


def test_publishers_that_hold_nothing_of_a_readers_tensors_do_not_change_its_plan(planned: PlannedJob) -> None:
    held = list(JOB.readers.held(1, TENSORS, JOB.model.experts))
    whole = Planner(planned.manifests, held).plan(1)
    others = list(planned.manifests)
    strangers = [manifest_of(rank, 99, iter(())) for rank in range(20)]
    assert Planner([*others, *strangers], held).plan(1) == whole


def test_a_tensor_that_nobody_holds_is_named(planned: PlannedJob) -> None:
    held = list(JOB.readers.held(0, TENSORS, JOB.model.experts))
    with pytest.raises(BenchmarkError, match=r"nobody holds .* of model"):
        Planner(planned.manifests[: JOB.trainers.stage_size], held).plan(0)


@pytest.mark.parametrize("feed", [False, True])
def test_a_modelled_sync_brings_every_byte_and_is_the_same_each_time(planned: PlannedJob, feed: bool) -> None:
    found = model_sync(planned, Hardware(), feed=feed)
    assert found == model_sync(planned, Hardware(), feed=feed)
    assert found.outcome.received_nbytes == {reader: plan.nbytes for reader, plan in enumerate(planned.plans)}
    assert 0 < found.low_s <= found.high_s
    assert all(busy_s <= found.high_s * (1 + 1e-9) for busy_s in found.outcome.served_s)


def test_a_narrower_spine_makes_a_sync_slower_and_becomes_its_limit(planned: PlannedJob) -> None:
    wide, narrow = (model_sync(planned, Hardware(leaf_cards=4, oversubscription=by)) for by in (1, 64))
    assert narrow.high_s > wide.high_s
    assert narrow.limit in ("leaf to spine", "spine to leaf")


def test_the_controllers_part_is_measured_with_its_own_code(planned: PlannedJob) -> None:
    cost = measure_controller(planned.manifests)
    assert cost.first_nbytes > sum(len(manifest.encoded) for manifest in planned.manifests)
    assert cost.grant_nbytes < cost.first_nbytes


@pytest.mark.parametrize(("mesh", "arguments"), [(TrainerMesh, (1, 2, 3, 4)), (ReaderMesh, (1, 6, 4))])
def test_meshes_that_cannot_be_divided_are_refused(mesh: type, arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cannot"):
        mesh(*arguments)


def test_a_quick_run_writes_rows_and_a_page_whose_tables_say_what_they_are(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    report, _ = quick_run("skipper.benchmarks.weight_sync", "--modelled", "--quick", "--page", str(page))
    names = [row.name for row in report.results]
    assert names[:4] == [PLAN, CONTROLLER, SYNC, SYNC]
    assert set(names[4:]) == {CHECK}
    text = page.read_text()
    for title in ("Plans: measured", "Controller: measured", "Sync: modelled", "Measured and modelled"):
        assert title in text
    assert "1.3 s" in text


def test_a_page_says_so_where_the_model_errs_by_more_than_it_may() -> None:
    def row(error: float, gave_costs: bool) -> Result:
        about = {"way": "shm", "setting": "1 → 1", "nbytes": 10**8, "fastest_s": 1.0, "modelled_s": 1 + error}
        return Result.single(CHECK, "s", 1.0, parameters={**about, "error": error, "gave_costs": gave_costs})

    good = section(Report(argv=[], config={}, results=[row(0.2, False), row(3.0, True)]))
    bad = section(Report(argv=[], config={}, results=[row(0.2, False), row(-0.3, False)]))
    assert "within 25% for 1" in good
    assert "orders of magnitude" not in good
    assert "largest error is -30%" in bad
    assert "orders of magnitude" in bad


def test_the_page_of_the_documentation_is_the_one_of_the_newest_run() -> None:
    newest = max((ROOT / "benchmarks" / "results" / "weight_sync").glob("*.json"))
    assert (ROOT / "docs" / "scale_weights.md").read_text() == section(Report.from_json(newest.read_text()))


@pytest.mark.parametrize("odd", [["--trainers", "2"], ["--model", "x"], ["-n", "3"], ["--device", "cuda"]])
def test_arguments_about_syncs_on_this_host_are_refused(odd: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--modelled", *odd]) == 2
    assert "leave it out with --modelled" in capsys.readouterr().err


def test_a_page_is_about_the_modelled_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--page", str(tmp_path / "page.md")]) == 2
    assert "--page is about --modelled" in capsys.readouterr().err


def _holders(planned: PlannedJob, tensor: ModelTensor) -> dict[int, "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]"]:
    """Which elements each publisher holds of a tensor."""
    found = {}
    dealt = JOB.trainers.deal([tensor], JOB.model.layers, JOB.model.experts)
    for rank in range(JOB.trainers.size):
        mask = np.zeros(tensor.shape, bool)
        for part in JOB.trainers.held(rank, dealt):
            for piece in part.pieces:
                mask[tuple(slice(o, o + s) for o, s in zip(piece.box.offsets, piece.box.shape, strict=True))] = True
        found[rank] = mask
    return found
