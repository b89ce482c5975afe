"""Casts down trees, in real processes: as straight ones in everything that can be seen, whoever dies on the way."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skipper import control
from skipper.control import (
    Accumulator,
    ActorError,
    ActorMesh,
    BackpressureError,
    Channel,
    Port,
    ProcMesh,
    SupervisionError,
    current_rank,
    endpoint,
    this_host,
)
from skipper.control.model.settings import adopt, settings
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.cast.messages import GivenAnswer, pack_answers
from skipper.control.runtime.cast.tree import Tree
from skipper.control.runtime.ports import Awaited, OneReply
from skipper.control.wire.messages import Kind
from skipper.control.wire.payload import pack
from tests.freezing import freeze

from .actors import Echo, Recorder
from .conftest import PATIENCE_S, Failures, alive, wait_until

SIZE, FANOUT = 7, 2
TREE = Tree(SIZE, FANOUT)
RELAY = 3
"""A rank that passes on to others, and is passed nothing on by any."""
DEEP = 6
"""A rank that is passed on to by one that is passed on to by `RELAY`."""
LIMIT = 256


class Witness(Recorder):
    """Remembers what it is told, and can be told to wait."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def rank(self) -> int:
        return current_rank().rank

    @endpoint
    def only(self, rank: int) -> int:
        if current_rank().rank == rank:
            raise KeyError(rank)
        return current_rank().rank

    @endpoint
    def read_to_the_end(self, path: str) -> None:
        self.read_file(path)

    @endpoint
    def waiting(self, rank: int, path: str) -> int:
        if current_rank().rank == rank:
            self.read_file(path)
        return current_rank().rank

    def read_file(self, path: str) -> None:
        with open(path, encoding="utf-8") as file:
            file.read()

    @endpoint(explicit_response_port=True)
    def later(self, port: Port[int]) -> None:
        port.send(current_rank().rank)

    @endpoint(explicit_response_port=True)
    def never(self, port: Port[int]) -> None:
        self.seen.append(port)

    @endpoint
    def kept(self) -> int:
        return max(len(branch._kept) for branch in runtime.current().casts.relays._relays.values())

    @endpoint
    def tell(self, port: Port[int]) -> int:
        port.send(current_rank().rank)
        return current_rank().rank

    @endpoint
    def cast_on(self, mesh: ActorMesh[Any], count: int) -> list[Any]:
        for number in range(count):
            mesh.note.broadcast(number)
            mesh.slice(p=DEEP).note.broadcast(-number)
        return list(mesh.everything.call().get(PATIENCE_S))

    @endpoint
    def results_of(self, mesh: ActorMesh[Any]) -> list[Any]:
        return sorted(ends_of(mesh.rank.stream()), key=str)


def ends_of(answers: Any) -> list[Any]:
    """The values of a stream; errors of the dead as ``dead``."""
    ends: list[Any] = []
    for answer in answers:
        try:
            ends.append(answer.get(PATIENCE_S))
        except SupervisionError:
            ends.append("dead")
    return ends


@pytest.fixture(scope="module", autouse=True)
def small_trees() -> Iterator[None]:
    before = settings()
    control.shutdown()
    control.configure(
        tree_threshold=SIZE - 2, tree_fanout=FANOUT, heartbeat_s=4.0, max_unhandled=LIMIT, send_timeout_s=0.3
    )
    yield
    control.shutdown()
    adopt(before)


@pytest.fixture(scope="module")
def witnesses(small_trees: None) -> ActorMesh[Any]:
    """Whom nobody kills."""
    return this_host().spawn_procs({"p": SIZE}).spawn("witnesses", Witness)


@pytest.fixture
def mortals(own_procs: Callable[..., ProcMesh]) -> ActorMesh[Any]:
    """Whom the test may kill."""
    return own_procs({"p": SIZE}, name="mortals").spawn("mortals", Witness)


def test_a_cast_has_a_value_of_every_rank_and_the_tree_carried_it(
    witnesses: ActorMesh[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(witnesses.rank.call().get(PATIENCE_S)) == list(range(SIZE))
    trees, bundles = runtime.current().casts, []
    take = trees.take

    def count(sender: Any, message: Any) -> None:
        bundles.append(sender.id)
        take(sender, message)

    monkeypatch.setattr(trees, "take", count)
    assert list(witnesses.rank.call().get(PATIENCE_S)) == list(range(SIZE))
    heads = {witnesses.root_members[span.first].id for span in TREE.heads}
    assert set(bundles) == heads  # the others have nothing to say to the caster themselves
    total = Accumulator(witnesses.rank, 0, lambda so_far, rank: so_far + rank)
    assert total.accumulate().get(PATIENCE_S) == sum(range(SIZE))
    part = witnesses.slice(p=slice(1, SIZE))
    assert list(part.rank.call().get(PATIENCE_S)) == list(range(SIZE - 1))  # the rank in the slice
    assert sorted(ends_of(part.rank.stream())) == list(range(SIZE - 1))


@pytest.mark.parametrize("slow", [RELAY, DEEP])
def test_a_rank_that_answers_late_holds_up_no_other(witnesses: ActorMesh[Any], tmp_path: Path, slow: int) -> None:
    path = tmp_path / "gate"
    os.mkfifo(path)
    answers = iter(witnesses.waiting.stream(slow, str(path)))
    others = sorted(next(answers).get(PATIENCE_S) for _ in range(SIZE - 1))
    assert others == [rank for rank in range(SIZE) if rank != slow]
    path.write_text("go on")
    assert ends_of(answers) == [slow]


def test_an_error_of_one_rank_is_that_ranks_and_nobody_elses(witnesses: ActorMesh[Any]) -> None:
    for rank in (0, RELAY, DEEP):
        with pytest.raises(ActorError, match=f"KeyError: {rank}") as caught:
            witnesses.only.call(rank).get(PATIENCE_S)
        assert f"witnesses[{rank}]" in caught.value.actor_id
    values, errors = [], []
    for answer in witnesses.only.stream(DEEP):
        try:
            values.append(answer.get(PATIENCE_S))
        except ActorError as error:
            errors.append(error.summary)
    assert sorted(values) == [rank for rank in range(SIZE) if rank != DEEP]
    assert errors == [f"KeyError: {DEEP}"]


def test_casts_and_straight_messages_keep_their_order(witnesses: ActorMesh[Any]) -> None:
    mesh = as_procs(witnesses).spawn("ordered", Witness)
    parts = {"all": range(SIZE), "most": range(1, SIZE), "few": range(4), "deep": [DEEP], "relay": [RELAY]}
    views = {
        "all": mesh,
        "most": mesh.slice(p=slice(1, SIZE)),
        "few": mesh.slice(p=slice(4)),
        "deep": mesh.slice(p=DEEP),
        "relay": mesh.slice(p=RELAY),
    }
    names = list(parts) * 20 + ["all", "deep"] * 30 + ["most", "all", "relay"] * 20
    for number, name in enumerate(names):
        views[name].note.broadcast(number)
    for rank, seen in enumerate(mesh.everything.call().get(PATIENCE_S)):
        assert (seen == [number for number, name in enumerate(names) if rank in parts[name]]) is True, rank
    mesh.stop().get(PATIENCE_S)


def as_procs(mesh: ActorMesh[Any]) -> ProcMesh:
    """The processes of a mesh, to spawn more actors there."""
    owned = runtime.current().root_actor.meshes.all()
    return next(other for other in owned if isinstance(other, ProcMesh) and other.root_members == mesh.root_members)


def test_what_goes_straight_waits_for_a_cast_that_is_stuck_on_its_way(witnesses: ActorMesh[Any]) -> None:
    pids = witnesses.pid.call().get(PATIENCE_S)
    mesh = as_procs(witnesses).spawn("stuck", Witness)
    mesh.initialized.get(PATIENCE_S)
    freeze(pids[RELAY])
    try:
        mesh.note.broadcast("cast")
        answer = mesh.slice(p=DEEP).everything.call_one()
        assert mesh.slice(p=0).everything.call_one().get(PATIENCE_S) == ["cast"]
        assert not answer.done()
    finally:
        os.kill(pids[RELAY], signal.SIGCONT)
    assert answer.get(PATIENCE_S) == ["cast"]
    mesh.stop().get(PATIENCE_S)


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_what_a_dead_relay_did_not_pass_on_comes_by_another_way_once_and_in_order(
    how: str, mortals: ActorMesh[Any], failures: Failures
) -> None:
    pids = mortals.pid.call().get(PATIENCE_S)
    freeze(pids[RELAY])
    for number in range(100):
        mortals.note.broadcast(number)
    stream = mortals.everything.stream()  # its replies, too, would have come through the relay
    mortals.note.broadcast("last")
    straight = mortals.slice(p=DEEP).everything.call_one()
    if how == "killed":
        os.kill(pids[RELAY], signal.SIGKILL)
    ends = ends_of(stream)
    assert ends.count("dead") == 1
    assert all(end == list(range(100)) for end in ends if end != "dead")
    assert straight.get(PATIENCE_S) == [*range(100), "last"]
    with pytest.raises(SupervisionError):
        mortals.rank.call().get(PATIENCE_S)
    assert sorted(ends_of(mortals.rank.stream()), key=str) == [rank for rank in range(SIZE) if rank != RELAY] + ["dead"]
    rest = mortals.slice(p=slice(RELAY + 1, SIZE))
    assert list(rest.everything.call().get(PATIENCE_S)) == [[*range(100), "last"]] * rest.size
    assert failures.wait().mesh_name == "mortals"
    wait_until(lambda: not alive(pids[RELAY]), "the relay is gone")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["ports.process_lost", "casts.peer_gone"])
def test_a_cast_at_the_very_moment_of_a_death_ends_too(
    step: str, when: str, mortals: ActorMesh[Any], failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = list(mortals.pid.call().get(PATIENCE_S))
    assert ends_of(mortals.rank.stream()).count("dead") == 0  # the tree stands
    part, _, name = step.partition(".")
    of = getattr(runtime.current(), part)
    original, answers = getattr(of, name), []

    def stepped(*args: Any) -> None:
        """What follows from the death, and a cast just before or just after; none after that, which might help it."""
        setattr(of, name, original)
        if when == "before":
            answers.append(mortals.rank.stream())
        original(*args)
        if when == "after":
            answers.append(mortals.rank.stream())

    monkeypatch.setattr(of, name, stepped)
    os.kill(pids[RELAY], signal.SIGKILL)
    wait_until(lambda: len(answers) == 1, "the news of the death")
    expected = [rank for rank in range(SIZE) if rank != RELAY] + ["dead"]
    assert sorted(ends_of(answers[0]), key=str) == expected
    assert failures.wait().mesh_name == "mortals"


def test_replies_for_a_route_that_a_relay_has_forgotten_end_nothing_of_its_own(witnesses: ActorMesh[Any]) -> None:
    process = runtime.current()
    future: OneReply[Any] = OneReply(Awaited(process.me, "nobody", "nothing"))
    port = process.ports.open(future)
    given = [GivenAnswer(0, Kind.REPLY, pack("of somebody else's call"))]
    process.casts.take(process.me, pack_answers(1, 1, port, given, is_home=False))
    assert not future.done()
    process.casts.take(process.me, pack_answers(1, 1, port, given, is_home=True))
    assert future.get(0) == "of somebody else's call"


def test_an_actor_that_did_not_launch_them_learns_of_every_death(
    witnesses: ActorMesh[Any], mortals: ActorMesh[Any], failures: Failures
) -> None:
    caster = witnesses.slice(p=0)
    assert caster.results_of.call_one(mortals).get(PATIENCE_S) == list(range(SIZE))
    pids = mortals.slice(p=slice(4, SIZE)).pid.call().get(PATIENCE_S)
    os.kill(pids[DEEP - 4], signal.SIGKILL)  # to which the caster has no link
    expected = [*range(DEEP), "dead"]
    wait_until(lambda: caster.results_of.call_one(mortals).get(PATIENCE_S) == expected, "the caster knows of the death")
    assert failures.wait().mesh_name == "mortals"


def test_a_member_may_cast_to_its_own_mesh(witnesses: ActorMesh[Any]) -> None:
    mesh = as_procs(witnesses).spawn("circle", Witness)
    for rank in (0, RELAY, DEEP):
        member = mesh.slice(p=rank)
        with pytest.raises(TimeoutError):
            member.cast_on.call_one(mesh, 3).get(0.2)  # it waits for itself, which nobody can help
    other = witnesses.slice(p=RELAY).cast_on.call_one(as_procs(witnesses).spawn("heard", Witness), 50)
    seen = other.get(PATIENCE_S)
    assert all(heard == list(range(50)) for rank, heard in enumerate(seen) if rank != DEEP)
    assert seen[DEEP] == [value for number in range(50) for value in (number, -number)]


def test_a_rank_that_falls_behind_slows_the_caster_and_is_not_forgotten(
    witnesses: ActorMesh[Any], tmp_path: Any
) -> None:
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    mesh = as_procs(witnesses).spawn("slowed", Witness)
    mesh.slice(p=DEEP).read_to_the_end.broadcast(gate)
    for number in range(LIMIT):
        mesh.note.broadcast(number)
    with pytest.raises(BackpressureError, match="a member of the mesh has not handled"):
        mesh.note.broadcast(LIMIT)
    other = as_procs(witnesses).spawn("beside", Witness)
    assert list(other.rank.call().get(PATIENCE_S)) == list(range(SIZE))  # of the same processes
    os.close(os.open(gate, os.O_WRONLY))
    wait_until(lambda: len(mesh.slice(p=DEEP).everything.call_one().get(PATIENCE_S)) == LIMIT, "it catches up")
    for number in range(LIMIT, 3 * LIMIT):
        mesh.note.broadcast(number)
    for seen in mesh.everything.call().get(PATIENCE_S):
        assert (seen == list(range(3 * LIMIT))) is True
    mesh.stop().get(PATIENCE_S)
    other.stop().get(PATIENCE_S)


def test_what_is_kept_for_a_caster_that_waits_for_long_is_bounded(witnesses: ActorMesh[Any]) -> None:
    mesh = as_procs(witnesses).spawn("kept", Witness)
    waits = mesh.never.call()
    for _ in range(12):
        answers = [mesh.rank.call() for _ in range(100)]
        assert all(list(answer.get(PATIENCE_S)) == list(range(SIZE)) for answer in answers)
    assert max(mesh.kept.call().get(PATIENCE_S)) == 1024
    assert not waits.done()
    mesh.stop().get(PATIENCE_S)


def test_large_arguments_and_results_arrive_too(witnesses: ActorMesh[Any]) -> None:
    mesh = as_procs(witnesses).spawn("echo", Echo)
    large = bytes(300 << 10)
    assert all(value == large for value in mesh.echo.call(large).get(PATIENCE_S))
    assert all(value == bytes(1000) for value in mesh.echo.call(bytes(1000)).get(PATIENCE_S))
    mesh.stop().get(PATIENCE_S)


def test_nothing_is_kept_of_meshes_that_have_ended(witnesses: ActorMesh[Any]) -> None:
    trees = runtime.current().casts
    before = len(trees._routes)
    for _ in range(3):
        mesh = as_procs(witnesses).spawn("brief", Witness)
        mesh.rank.call().get(PATIENCE_S)
        mesh.slice(p=slice(1, SIZE)).rank.call().get(PATIENCE_S)
        assert len(trees._routes) == before + 2
        mesh.stop().get(PATIENCE_S)
        assert len(trees._routes) == before


def test_explicit_answers_and_what_was_sent_to_ports_before_arrive_as_ever(witnesses: ActorMesh[Any]) -> None:
    assert list(witnesses.later.call().get(PATIENCE_S)) == list(range(SIZE))
    port, receiver = Channel.open()
    for _ in range(20):  # the last test: from now on these processes answer straight
        witnesses.tell.call(port).get(PATIENCE_S)
        assert sorted(receiver.recv().get(0) for _ in range(SIZE)) == list(range(SIZE))  # all there already
