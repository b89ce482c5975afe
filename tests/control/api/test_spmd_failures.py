"""Ranks of SPMD code fail together: one raises or dies, the others leave their collectives, the next run is whole."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator

import pytest

from skipper.control import (
    Actor,
    ActorError,
    ActorMesh,
    ProcMesh,
    RankFailedError,
    SpmdActor,
    SupervisionError,
    endpoint,
    this_host,
)
from tests.control.api.parallel_ranks import loss_alone, reduce, train, wait_for_what_cannot_be_aborted
from tests.control.conftest import Failures

STEPS = 3
LEAVE_S = 100.0
"""For processes that import torch on a busy machine. gloo waits for half an hour by itself."""
TIMES = 20
pytestmark = pytest.mark.timeout(400)


class Usage(Actor):
    """What its process has open."""

    @endpoint
    def count(self) -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def four_procs() -> ProcMesh:
    return this_host().spawn_procs({"gpus": 4}, env={"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def four() -> Iterator[ProcMesh]:
    mesh = four_procs()
    yield mesh
    mesh.stop().get(LEAVE_S)


@pytest.fixture(scope="module")
def trainers(four: ProcMesh) -> ActorMesh[SpmdActor]:
    return four.spawn("trainers", SpmdActor, train, STEPS)


@pytest.fixture(scope="module")
def reducers(four: ProcMesh) -> ActorMesh[SpmdActor]:
    return four.spawn("reducers", SpmdActor, reduce, "never")


def ends(mesh: ActorMesh[SpmdActor], *args: object, **options: object) -> list[object]:
    """How each rank's call ends, in the order in which they end."""
    outcomes: list[object] = []
    for future in mesh.run.stream(*args, **options):
        try:
            outcomes.append(future.get(LEAVE_S))
        except (ActorError, SupervisionError) as error:
            outcomes.append(error)
    return outcomes


def others_name(outcomes: list[object], rank: int, summary: str) -> list[object]:
    """See that all but one have ended since this rank has failed; returns how that one has."""
    causes = [outcome.cause if isinstance(outcome, ActorError) else outcome for outcome in outcomes]
    others = [cause for cause in causes if isinstance(cause, RankFailedError)]
    assert [(other.rank, other.size) for other in others] == [(rank, 4)] * 3, outcomes
    assert all(summary in str(other) for other in others)
    return [cause for cause in causes if cause not in others]


def test_all_ranks_leave_when_one_raises_and_the_next_run_trains(trainers: ActorMesh[SpmdActor]) -> None:
    right = trainers.run.call().get(LEAVE_S)[0]
    assert right[0] == pytest.approx(loss_alone(), rel=1e-4)
    assert right == sorted(right, reverse=True)
    for failing in (3, 0):
        (own,) = others_name(ends(trainers, STEPS, failing=failing), failing, "ValueError: this rank fails")
        assert isinstance(own, ValueError)
        for losses in trainers.run.call().get(LEAVE_S):
            assert losses == pytest.approx(right, rel=1e-6)


def test_survivors_leave_when_a_rank_is_killed_and_a_later_run_is_refused_at_once(failures: Failures) -> None:
    procs = four_procs()
    doomed = procs.spawn("doomed", SpmdActor, train, STEPS)
    (own,) = others_name(ends(doomed, STEPS, failing=2, how="kill"), 2, "died")
    assert isinstance(own, SupervisionError)
    (own,) = others_name(ends(doomed, STEPS), 2, "died")
    assert isinstance(own, SupervisionError)
    with contextlib.suppress(SupervisionError):
        procs.stop().get(LEAVE_S)
    assert failures.wait().mesh_name == "doomed"


@pytest.mark.parametrize(
    "moment",
    [
        "before they meet",
        "before a group is made",
        "while much is under way",
        "before it sends",
        "and destroys its groups",
        "and others try again",
    ],
)
@pytest.mark.parametrize("failing", [0, 3])
def test_all_ranks_leave_whatever_they_wait_for(reducers: ActorMesh[SpmdActor], moment: str, failing: int) -> None:
    (own,) = others_name(ends(reducers, moment, failing=failing), failing, "ValueError: this rank fails")
    assert isinstance(own, ValueError)
    assert list(reducers.run.call(moment).get(LEAVE_S)) == [4.0] * 4


def test_a_rank_that_cannot_be_woken_is_given_up_at_its_bound(
    own_procs: Callable[..., ProcMesh], failures: Failures
) -> None:
    procs = own_procs({"gpus": 2})
    stuck = procs.spawn("stuck", SpmdActor, wait_for_what_cannot_be_aborted, 8.0, bound_s=1.0)
    outcomes = []
    for future in stuck.run.stream():
        with pytest.raises((ActorError, SupervisionError)) as caught:
            future.get(LEAVE_S)
        outcomes.append(str(caught.value))
    own, given_up = sorted(outcomes, key=lambda outcome: "has not left its collective" in outcome)
    assert "ValueError: this rank fails" in own
    assert "has not left its collective within 1 s: it stands at" in given_up
    assert failures.wait().mesh_name == "stuck"


def test_failures_in_a_row_leave_no_threads_and_no_descriptors(four: ProcMesh, trainers: ActorMesh[SpmdActor]) -> None:
    usage = four.spawn("usage", Usage)
    counts = []
    for number in range(TIMES):
        others_name(ends(trainers, STEPS, failing=number % 4), number % 4, "ValueError: this rank fails")
        counts.append(list(usage.count.call().get(LEAVE_S)))
    warm = counts[3]  # each rank has failed once
    for then, now in zip(warm, counts[-1], strict=True):
        assert now[0] <= then[0] + 6, counts  # those of one group, of which one process keeps more than another
        assert now[1] <= then[1] + 12, counts


def master_port() -> tuple[int, bool, bool]:
    """The port, and whether others could have it: asked for by itself, and for a server."""
    port = int(os.environ["MASTER_PORT"])
    return port, is_free(port, is_server=False), is_free(port, is_server=True)


def is_free(port: int, *, is_server: bool) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, is_server)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError:
            return False
        return True


def test_the_port_is_held_while_the_code_runs_and_free_afterwards(own_procs: Callable[..., ProcMesh]) -> None:
    port, is_for_anybody, is_for_the_store = (
        own_procs({"gpus": 1}).spawn("one", SpmdActor, master_port).run.call_one().get(LEAVE_S)
    )
    assert not is_for_anybody
    assert is_for_the_store
    assert is_free(port, is_server=False)
