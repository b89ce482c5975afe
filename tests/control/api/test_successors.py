"""Processes that take the place of others in a mesh, and actors that are made there."""

import os
import signal
from collections.abc import Callable

import pytest

from skipper.control import Actor, ProcMesh, SupervisionError, endpoint, this_host
from tests.control.conftest import PATIENCE_S, Failures, alive, wait_until

Spawn = Callable[..., ProcMesh]


class Member(Actor):
    def __init__(self, word: str) -> None:
        self.word = word

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def say(self) -> str:
        return self.word


def killed(procs: ProcMesh, pids: list[int], position: int) -> None:
    ended = procs.slice(gpus=position).ended
    os.kill(pids[position], signal.SIGKILL)
    ended.get(PATIENCE_S)


def test_actors_go_on_with_one_in_a_process_that_has_taken_the_place_of_another(
    own_procs: Spawn, failures: Failures
) -> None:
    procs = own_procs({"gpus": 3})
    members = procs.spawn("members", Member, "first")
    pids = list(members.pid.call().get(PATIENCE_S))
    killed(procs, pids, 1)
    with pytest.raises(SupervisionError):
        members.pid.call().get(PATIENCE_S)
    assert procs.lost() == (1,)
    assert procs.slice(gpus=slice(1, 3)).lost() == (0,)
    again = procs.with_successors({1: this_host().spawn_procs(name="spare")})
    assert again == procs
    assert again.lost() == ()
    assert again.root_members[0] is procs.root_members[0]
    both = members.with_successors(again, "second")
    assert list(both.say.call().get(PATIENCE_S)) == ["first", "second", "first"]
    assert both.slice(gpus=1).say.call_one().get(PATIENCE_S) == "second"
    assert list(both.over(again.slice(gpus=slice(1, 3))).say.call().get(PATIENCE_S)) == ["second", "first"]
    assert members.slice(gpus=2).say.call_one().get(PATIENCE_S) == "first"  # of the old reference
    assert again.slice(gpus=1).within(procs).root_members == procs.root_members

    pids = list(both.pid.call().get(PATIENCE_S))
    seen = len(failures)
    killed(again, pids, 1)
    wait_until(lambda: len(failures) > seen, "the owner is told of the new one, too")
    assert {failure.mesh_name for failure in failures} == {"members"}
    last = again.with_successors({1: this_host().spawn_procs(name="spare")})
    pids = list(both.with_successors(last, "third").pid.call().get(PATIENCE_S))
    last.stop().get(PATIENCE_S)
    wait_until(lambda: not any(map(alive, pids)), "all that were members have ended")


def test_a_part_of_a_mesh_takes_the_place_of_a_process_and_all_of_both_ends_at_the_stop(own_procs: Spawn) -> None:
    procs, spares = own_procs({"gpus": 2}), own_procs({"spares": 2})
    joint = procs.slice(gpus=slice(1, 2)).with_successors({0: spares.slice(spares=1)})
    assert joint.ranks == (1,)
    members = joint.root.spawn("members", Member, "word")
    assert list(members.say.call().get(PATIENCE_S)) == ["word", "word"]
    pids = [
        pid
        for mesh in (procs, spares, joint.root)
        for pid in mesh.spawn("members", Member, "word").pid.call().get(PATIENCE_S)
    ]
    assert len(set(pids)) == 4
    joint.root.stop().get(PATIENCE_S)
    wait_until(lambda: not any(map(alive, pids)), "all of them have ended")


def test_what_does_not_fit_is_refused(own_procs: Spawn) -> None:
    procs, others = own_procs({"gpus": 2}), own_procs({"gpus": 3})
    members = procs.spawn("members", Member, "word")
    with pytest.raises(ValueError, match="the successor of a process is one process"):
        procs.with_successors({0: others})
    with pytest.raises(IndexError, match="no process at position 2"):
        procs.with_successors({2: others.slice(gpus=0)})
    with pytest.raises(ValueError, match="was not spawned on the processes"):
        members.with_successors(others, "word")
    with pytest.raises(ValueError, match="is another mesh"):
        procs.within(others)
    with pytest.raises(TypeError):
        members.with_successors(procs.with_successors({0: others.slice(gpus=0)}))
