"""Ordinary SPMD code on a mesh: what it finds in its environment, again and again, and what its failures are."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from skipper.control import (
    Actor,
    ActorError,
    ActorMesh,
    ProcMesh,
    RendezvousError,
    ScriptExitError,
    SpmdActor,
    SupervisionError,
    context,
    endpoint,
    get_or_spawn_controller,
)
from skipper.control.api import spmd_runs
from skipper.control.api.spmd import SpmdRank
from skipper.control.api.spmd_runs import RankFailure, RankLocation, SpmdRuns
from skipper.control.runtime.context import local_actor
from skipper.control.support.process_groups import StorePlace
from skipper.trust.own_sockets import SocketPlace
from tests.control.conftest import Failures

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def environment(*, more: str = "") -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in VARIABLES + INTERFACES} | {"more": more}


def reduced(value: float, *, failing: int = -1) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == failing:
        raise ValueError("this rank fails")
    tensor = torch.tensor([value * (1 + dist.get_rank())])
    dist.all_reduce(tensor)
    return float(tensor)  # and leaves the group as it is


@pytest.fixture(scope="module")
def reducers(procs: ProcMesh) -> Iterator[ActorMesh[SpmdActor]]:
    mesh = procs.spawn("reducers", SpmdActor, reduced, 1.0)
    yield mesh
    mesh.stop().get(20)


def test_each_rank_finds_its_place_in_the_environment_and_nothing_stays_there(procs: ProcMesh) -> None:
    actors = procs.spawn("ranks", SpmdActor, environment)
    first, second = actors.run.call(more="x").get(60)
    assert [first[name] for name in VARIABLES[:6]] == ["0", "2", "0", "2", "0", "127.0.0.1"]
    assert [second[name] for name in VARIABLES[:6]] == ["1", "2", "1", "2", "0", "127.0.0.1"]
    assert first["MASTER_PORT"] == second["MASTER_PORT"] != "0"
    assert first["more"] == "x"
    assert [second[name] for name in INTERFACES] == ["lo", "=lo"]
    probe = procs.spawn(
        "after", SpmdActor, "tests.control.api.test_spmd", "unused"
    )  # as a module: it only defines things
    assert list(probe.run.call().get(60)) == [None, None]
    with pytest.raises(ActorError, match="whole mesh") as caught:
        actors.slice(gpus=0).run.call_one().get(60)
    assert isinstance(caught.value.cause, ValueError)


def test_interfaces_that_the_user_has_named_stay(own_procs: Callable[..., ProcMesh]) -> None:
    actors = own_procs(env={"GLOO_SOCKET_IFNAME": "eth9"}).spawn("ranks", SpmdActor, environment)
    for _ in range(2):
        found = actors.run.call_one().get(60)
        assert [found[name] for name in INTERFACES] == ["eth9", "=lo"]


def test_a_process_group_forms_in_each_run_with_the_arguments_given(reducers: ActorMesh[SpmdActor]) -> None:
    assert list(reducers.run.call().get(60)) == [3.0, 3.0]
    assert list(reducers.run.call(2.0).get(60)) == [6.0, 6.0]


def test_a_rank_that_raises_fails_the_others_and_the_next_run_is_whole(reducers: ActorMesh[SpmdActor]) -> None:
    causes: list[BaseException | None] = []
    for future in reducers.run.stream(1.0, failing=1):
        with pytest.raises(ActorError) as caught:
            future.get(60)
        causes.append(caught.value.cause)
    assert sorted(type(cause).__name__ for cause in causes) == ["RankFailedError", "ValueError"]
    assert "rank 1 of 2 failed first, with ValueError: this rank fails" in " ".join(map(str, causes))
    assert list(reducers.run.call(1.0).get(60)) == [3.0, 3.0]


def test_a_script_runs_as_if_started_for_this_rank(procs: ProcMesh, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, beside\n"
        "if __name__ == '__main__':\n"
        "    with open(sys.argv[1] + os.environ['RANK'], 'w') as file:\n"
        "        print(sys.argv[0], sys.argv[2:], beside.WORD, file=file)\n"
        "    sys.exit(int(sys.argv[2]))\n"
    )
    actors = procs.spawn("script", SpmdActor, script, tmp_path / "out", 0)
    assert list(actors.run.call().get(60)) == [None, None]
    for rank in range(2):
        assert (tmp_path / f"out{rank}").read_text() == f"{script} ['0'] found\n"
    causes: list[BaseException | None] = []
    for future in actors.run.stream(tmp_path / "out", 7):
        with pytest.raises(ActorError, match=r"train\.py ended by sys\.exit\(7\)") as caught:
            future.get(60)
        causes.append(caught.value.cause)
    statuses = [cause.status for cause in causes if isinstance(cause, ScriptExitError)]
    assert statuses[:1] == [7]  # the other rank may have been told of it before it came so far


def test_what_cannot_be_run_is_refused(procs: ProcMesh, failures: Failures) -> None:
    missing = procs.slice(gpus=0).spawn("missing", SpmdActor, "there_is_no.py")
    with pytest.raises(SupervisionError, match=r"there is no script there_is_no\.py"):
        missing.run.call_one().get(60)
    assert failures.wait().mesh_name == "missing"
    number = procs.slice(gpus=0).spawn("number", SpmdActor, 7)
    with pytest.raises(SupervisionError, match="the path of a script or the name of a module, not 7"):
        number.run.call_one().get(60)
    module = procs.slice(gpus=0).spawn("module", SpmdActor, "json.tool", indent=2)
    with pytest.raises(ActorError, match="no keywords"):
        module.run.call_one().get(60)


class Member(Actor):
    """Takes the part of a rank."""

    @endpoint
    def ref(self) -> object:
        return local_actor(context().actor_instance).ref


def runs_of(procs: ProcMesh) -> tuple[ActorMesh[SpmdRuns], list[object]]:
    """The actor that knows of all runs, and two ranks."""
    job = get_or_spawn_controller("skipper-spmd-runs", SpmdRuns).get(20)
    return job, list(procs.spawn("members", Member).ref.call().get(20))


def test_ranks_that_wait_for_one_that_does_not_come_say_so(procs: ProcMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spmd_runs, "MEET_TIMEOUT_S", 0.2)  # those who meet do so in this process
    job, (_, second) = runs_of(procs)
    place = RankLocation("here", "host", 1)
    with pytest.raises(ActorError, match=r"ranks \[0, 2\] of 3 have not arrived") as caught:
        job.meet.call_one(second, 1, 3, place).get(20)
    assert isinstance(caught.value.cause, RendezvousError)


def test_the_first_failure_is_one_that_does_not_follow_from_another(procs: ProcMesh) -> None:
    job, (first, second) = runs_of(procs)
    place = RankLocation("here", "host", 1)
    broken, cause = RankFailure(0, "a connection broke", is_consequence=True), RankFailure(1, "ValueError: x")
    for run, failures, expected in ((1, (broken, cause), cause), (2, (broken, broken), broken)):
        meetings = [job.meet.call_one(member, run, 2, place) for member in (first, second)]
        assert [len(meeting.get(20)) for meeting in meetings] == [2, 2]
        told = job.wait_for_failure.call_one(second, run)
        ends = [job.leave.call_one(first, run, failures[0])]
        assert told.get(20)  # before it is known which was the first
        ends.append(job.leave.call_one(second, run, failures[1]))
        assert [end.get(20) for end in ends] == [expected, expected]


def test_a_run_that_has_ended_well_tells_nobody_of_a_failure(procs: ProcMesh) -> None:
    job, (first, second) = runs_of(procs)
    place = RankLocation("here", "host", 1)
    meetings = [job.meet.call_one(member, 1, 2, place) for member in (first, second)]
    assert [len(meeting.get(20)) for meeting in meetings] == [2, 2]
    told = job.wait_for_failure.call_one(first, 1)
    assert [job.leave.call_one(member, 1, None).get(20) for member in (first, second)] == [None, None]
    assert told.get(20) is False


def test_ranks_of_several_hosts_are_counted_host_by_host() -> None:
    places = [
        RankLocation("a", "one", 10),
        RankLocation("b", "two", 20),
        RankLocation("a", "one", 30),
        RankLocation("b", "two", 40),
    ]
    ranks = [SpmdRank.of(rank, places) for rank in range(4)]
    assert [(rank.local_rank, rank.local_world_size, rank.host_rank) for rank in ranks] == [
        (0, 2, 0),
        (0, 2, 1),
        (1, 2, 0),
        (1, 2, 1),
    ]
    assert {(rank.master_addr, rank.master_port, rank.world_size) for rank in ranks} == {("one", 10, 4)}
    assert SpmdRank.of(0, places[:1]).master_addr == "127.0.0.1"


def test_connections_of_the_store_are_told_from_others_with_the_same_number() -> None:
    place = StorePlace("10.0.0.1", 4000, size=2, is_here=False)
    own, other = SocketPlace.of(("10.0.0.2", 5000)), SocketPlace.of(("10.0.0.2", 4000))
    assert place.is_end_of(own, SocketPlace.of(("10.0.0.1", 4000)))
    assert not place.is_end_of(own, SocketPlace.of(("10.0.0.3", 4000)))
    assert not place.is_end_of(own, SocketPlace.of(("10.0.0.1", 4001)))
    assert not place.is_end_of(other, SocketPlace.of(("10.0.0.3", 5000)))
    assert replace(place, is_here=True).is_end_of(other, SocketPlace.of(("192.168.7.1", 5000)))
    assert replace(place, host="a-name").is_end_of(own, SocketPlace.of(("10.0.0.1", 4000)))
