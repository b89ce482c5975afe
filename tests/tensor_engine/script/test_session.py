"""What the engine keeps, on both sides: no more than what the script still refers to, and no longer."""

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from skipper import tensor_engine
from skipper.control import Actor, ProcMesh, endpoint
from skipper.tensor_engine import Stream, inspect, remote
from skipper.tensor_engine.script import instruction_stream, issue
from skipper.tensor_engine.script.session import session_of
from tests.tensor_engine import flat
from tests.tensor_engine import user_functions as functions
from tests.tensor_engine.conftest import PATIENCE_S, values_on

ROOT = Path(__file__).resolve().parents[3]


def test_memory_there_goes_with_the_last_reference_here(procs: ProcMesh) -> None:
    before = values_on(procs)
    with procs.activate():
        x = torch.ones(4, requires_grad=True)
        view = x.detach().view(2, 2)
        y = (x * 2).sin()
        loss = y.sum()
    loss.backward()
    assert values_on(procs) > before + 3
    del x, y, loss
    gc.collect()
    assert values_on(procs) == before + 2  # the view, and what torch knows it to be a view of
    assert inspect(view).tolist() == [[1, 1], [1, 1]]
    view.drop()
    assert values_on(procs) == before + 1
    del view
    assert values_on(procs) == before


def test_what_is_remembered_does_not_grow_with_the_number_of_operations(
    procs: ProcMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instruction_stream, "_AHEAD", 1000)
    early, late = flat.run(procs, 20_000)
    assert late["values"] == early["values"]
    assert late["sites"] == early["sites"]
    between_acknowledgements = instruction_stream._UNACKNOWLEDGED * instruction_stream._LARGEST
    assert 0 < max(early["remembered"], late["remembered"]) < 1000 + 2 * between_acknowledgements
    for side in ("script_nbytes", "worker_nbytes"):
        assert late[side] < early[side] + (16 << 20)


@pytest.fixture
def few_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(issue, "_MOST_SITES", len(issue._sites) + 2)


def test_kinds_of_operations_that_are_forgotten_are_forgotten_there_too_and_made_again(
    procs: ProcMesh, few_sites: None
) -> None:
    with procs.activate():
        x = torch.ones(3, 50)
        total = torch.zeros(3)
        for _ in range(2):
            for size in range(1, 40):
                total = total + x[:, :size].sum(1)
    assert inspect(total, gpus=1)[0] == 2 * sum(range(1, 40))
    session_of(procs).synchronize(PATIENCE_S)
    known = (
        session_of(procs)
        .workers(instruction_stream.MAIN)
        .ask.call("tests.tensor_engine.on_workers:sites", 0, None)
        .get(PATIENCE_S)
    )
    assert max(known) <= issue._MOST_SITES + 1


def test_kinds_of_operations_that_are_in_use_are_kept(
    procs: ProcMesh, few_sites: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[str] = []

    def propagate(func: Any, *rest: Any) -> Any:
        learned.append(str(func))
        return plainly(func, *rest)

    plainly = issue.propagate
    monkeypatch.setattr(issue, "propagate", propagate)
    with procs.activate():
        total, rows = torch.zeros(11), torch.ones(60, 11)
        for size in range(1, 60):
            total = total.mul(2) - total
            rows[:size]
    assert learned.count("aten.slice.Tensor") == 59
    assert learned.count("aten.mul.Tensor") == 1


def test_what_is_issued_is_run_though_nothing_follows(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.ones(2)
    way = session_of(procs).instruction_stream(procs)
    inspect(x)
    x.add_(1)
    while way.count:  # the flusher sends it; the time limit of the test is the bound
        pass
    assert inspect(x).tolist() == [2, 2]


def test_large_tensors_come_whole_and_are_not_changed_by_what_follows(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.arange(300_000, dtype=torch.float32).reshape(300, 1000) + procs.rank_tensor("gpus")
    there = x.t()
    coming = tensor_engine.fetch_shard(there, gpus=1)
    x.zero_()
    found = coming.get(PATIENCE_S)
    expected = torch.arange(300_000, dtype=torch.float32).reshape(300, 1000).t() + 1
    torch.testing.assert_close(found, expected)
    assert coming.done()
    assert inspect(there).abs().sum() == 0


def test_a_fetch_waits_for_the_rank_that_it_asks_and_a_strict_one_for_all(procs: ProcMesh) -> None:
    side = Stream("lets the first rank go on")
    with procs.activate():
        held = remote(functions.hold_first, propagate=lambda name, rank: rank)("held", procs.rank_tensor("gpus"))
        strict = tensor_engine.fetch_shard(held, gpus=1, strict=True)
        assert inspect(held + 1, gpus=1, timeout=PATIENCE_S).item() == 2
        assert not strict.done()
        with side.activate():
            remote(functions.set_event)("held", torch.ones(1))
    assert strict.get(PATIENCE_S).item() == 1


async def test_a_fetch_is_awaited_in_an_event_loop(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.ones(2)
    assert (await tensor_engine.fetch_shard(x, {"gpus": 1})).tolist() == [1, 1]


def test_dtypes_come_as_they_are(procs: ProcMesh) -> None:
    with procs.activate():
        for dtype in (torch.bfloat16, torch.float16, torch.bool, torch.int8, torch.complex64):
            x = torch.tensor([[0, 1], [1, 0]], dtype=dtype)
            found = inspect(x.t().conj())
            assert found.dtype == dtype
            assert found.tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4), (1, 2, 2)])
def test_a_small_shard_is_a_tensor_of_the_script_also_where_a_mesh_is_active(
    procs: ProcMesh, shape: tuple[int, ...]
) -> None:
    with procs.activate():
        x = torch.full(shape, 2.0)
        found = inspect(x)
        issued = session_of(procs).instruction_stream(procs).issued
        again = inspect(x)
        assert session_of(procs).instruction_stream(procs).issued == issued
    assert type(found) is torch.Tensor
    assert found.is_contiguous()
    found += 1  # it is no view of what others have
    assert torch.equal(found, torch.full(shape, 3.0))
    assert torch.equal(again, torch.full(shape, 2.0))


def test_a_fetch_comes_behind_what_was_issued_to_the_same_worker_for_a_part_of_the_mesh(procs: ProcMesh) -> None:
    with procs.activate():
        whole = torch.zeros(2)
    part = whole.slice_mesh(gpus=0)  # type: ignore[attr-defined]
    for number in range(1, 4):
        inspect(whole)
        part.add_(1)
        assert inspect(whole).tolist() == [number, number]


def test_show_prints_the_place_and_the_values(procs: ProcMesh, capsys: pytest.CaptureFixture[str]) -> None:
    with procs.activate():
        tensor_engine.show(torch.ones(1) * procs.rank_tensor("gpus"), gpus=1)
    assert capsys.readouterr().out == "{'gpus': 1}: tensor([1.])\n"


def test_a_script_that_ends_reports_what_nobody_has_seen_and_does_not_end_well(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom skipper.control import this_host\n"
        "procs = this_host().spawn_procs()\n"
        "with procs.activate():\n"
        "    x = torch.ones(2)[torch.tensor([5])]  # unseen\n"
        "print('done')\n"
    )
    done = subprocess.run([sys.executable, script], cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
                          capture_output=True, text=True, timeout=100)  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "done\n")
    assert "torch.ones(2)[torch.tensor([5])]  # unseen" in done.stderr
    assert "index 5 is out of bounds" in done.stderr


class Driver(Actor):
    """An actor that has tensors of its own on the processes of the script."""

    @endpoint
    def drive(self, procs: ProcMesh) -> list[float]:
        with procs.activate():
            x = torch.ones(3) * procs.rank_tensor("gpus") + 1
        found: list[float] = inspect(x, gpus=1, timeout=PATIENCE_S).tolist()
        tensor_engine.shutdown()
        return found


def test_an_actor_drives_the_same_processes_beside_the_script(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.zeros(2)
    driver = procs.slice(gpus=0).spawn("driver", Driver)
    assert driver.drive.call_one(procs).get(PATIENCE_S) == [2, 2, 2]
    assert inspect(x, gpus=1).tolist() == [0, 0]
    driver.stop().get(PATIENCE_S)
