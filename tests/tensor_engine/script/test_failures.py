"""What fails on a worker: it poisons what depends on it and nothing else, and the script learns where and why."""

import re
import threading

import pytest
import torch

from skipper import tensor_engine
from skipper.control import ProcMesh
from skipper.tensor_engine import EngineClosedError, RemoteError, Tensor, inspect
from skipper.tensor_engine.script.fetch import fetch_shard
from skipper.tensor_engine.script.issue import issue_call
from skipper.tensor_engine.script.session import session_of
from tests.tensor_engine.conftest import PATIENCE_S


def failing(procs: ProcMesh, x: torch.Tensor, rank: int = 0) -> Tensor:
    """Twice ``x``; fails on one rank."""
    assert isinstance(x, Tensor)
    instruction_stream = session_of(procs).instruction_stream(procs)
    meta = x.remote_value.meta
    where = "tests.tensor_engine.on_workers:fail_on"
    return issue_call(
        where, (x,), (meta,), instruction_stream=instruction_stream, mesh=procs, name="double", static=rank
    )[0]


def out_of_range(x: torch.Tensor) -> torch.Tensor:
    return x[torch.tensor([7])]  # this line is to blame


def test_a_failure_is_raised_with_the_stacks_of_both_sides_and_the_rank(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.arange(3.0)
        y = out_of_range(x) * 2 + 1
    with pytest.raises(RemoteError, match="index 7 is out of bounds") as caught:
        inspect(y, gpus=1)
    error = caught.value
    assert error.rank == 1
    assert "aten::index" in error.operation
    assert "return x[torch.tensor([7])]  # this line is to blame" in error.script_stack
    assert "in out_of_range" in error.script_stack
    assert "tensor_engine/script/issue.py" not in error.script_stack
    assert "Traceback" in error.worker_stack
    assert isinstance(error, RuntimeError)


def test_only_what_depends_on_the_failure_is_poisoned(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.ones(2)
    bad = failing(procs, x)
    after, beside = bad + x, x + 1
    together = torch.cat([bad, x])
    for poisoned in (bad, after, together, bad.view(2, 1)):
        with pytest.raises(RemoteError, match="told to fail"):
            inspect(poisoned, timeout=PATIENCE_S)
    assert inspect(beside).tolist() == [2, 2]
    assert inspect(after, gpus=1).tolist() == [3, 3]  # the other rank is well
    with pytest.raises(RemoteError, match="rank 0"):
        fetch_shard(after, gpus=1, strict=True).get(PATIENCE_S)


def test_a_failed_change_in_place_poisons_all_that_share_the_memory(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.zeros(2, 3)
        view, copy = x[0], x.clone()
        bad = failing(procs, torch.zeros(2, 3), rank=1)
    x[:, 1:].add_(bad[:, 1:])
    for poisoned in (x, view, x.t()):
        assert inspect(poisoned, gpus=0).sum() == 0
        with pytest.raises(RemoteError, match="told to fail"):
            inspect(poisoned, gpus=1)
    assert inspect(copy, gpus=1).tolist() == [[0, 0, 0]] * 2


def test_a_call_gives_each_rank_what_it_returns_and_nothing_where_it_returns_none(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.ones(2) * procs.rank_tensor("gpus")
    assert isinstance(x, Tensor)
    instruction_stream, meta = session_of(procs).instruction_stream(procs), x.remote_value.meta
    where = "tests.tensor_engine.on_workers:transposed"
    both, first = issue_call(
        where,
        (x, x),
        (meta, meta),
        instruction_stream=instruction_stream,
        mesh=procs,
        constant=[3.0, 4.0],
    )
    assert [inspect(both, gpus=rank).tolist() for rank in range(2)] == [[0, 0], [2, 2]]
    assert inspect(first).tolist() == [3, 4]
    with pytest.raises(EngineClosedError, match="no such tensor"):
        inspect(first, gpus=1)


def test_failures_that_nobody_has_seen_are_reported_at_the_end(
    procs: ProcMesh, caplog: pytest.LogCaptureFixture
) -> None:
    session_of(procs).close(PATIENCE_S)  # what earlier tests have not looked at is none of this one's business
    caplog.clear()
    with procs.activate():
        x = torch.ones(2)
        unseen = [out_of_range(x), out_of_range(x)]
        seen = out_of_range(x)
    with pytest.raises(RemoteError):
        inspect(seen)
    del unseen, seen
    session_of(procs).close(PATIENCE_S)
    messages = [record.getMessage() for record in caplog.records if record.name == "skipper.tensor_engine"]
    assert len(messages) == 2
    assert "this line is to blame" in messages[0]
    assert re.search("index.* failed on ranks 0, 1, also unseen: .*out of bounds", messages[1])
    assert "\n" not in messages[1]


def test_the_engine_ends_after_a_failure_and_starts_anew(procs: ProcMesh) -> None:
    with procs.activate():
        x = torch.ones(2)
        bad = failing(procs, x)
    with pytest.raises(RemoteError):
        inspect(bad)
    session_of(procs).close(PATIENCE_S)
    with pytest.raises(EngineClosedError):
        x + 1
    with pytest.raises(EngineClosedError):
        inspect(x)
    with procs.activate():
        assert inspect(torch.ones(2)).tolist() == [1, 1]
    assert tensor_engine.script.session.all_sessions()


def test_what_cannot_be_sent_ends_the_engine_since_what_follows_would_miss_it(procs: ProcMesh) -> None:
    instruction_stream = session_of(procs).instruction_stream(procs)
    where = "tests.tensor_engine.on_workers:transposed"
    issue_call(where, (), (), instruction_stream=instruction_stream, mesh=procs, constant=threading.Lock())
    with pytest.raises(EngineClosedError, match=r"cannot go on.*pickle"):
        session_of(procs).flush()
    with procs.activate(), pytest.raises(EngineClosedError, match=r"cannot go on.*pickle"):
        inspect(torch.ones(2))
    session_of(procs).close(PATIENCE_S)
    with procs.activate():
        assert inspect(torch.ones(2)).tolist() == [1, 1]
