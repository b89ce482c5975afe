"""Errors that are alike are counted together, whichever actor they are of, and stay when their processes have ended."""

import json

from skipper.control import ActorMesh
from skipper.control.observe import job_status
from skipper.control.observe.dashboard_lookups import DashboardLookups
from skipper.control.observe.errors import (
    KEPT_PROCESSES,
    MOST_KINDS,
    MOST_NAMED,
    ProcessErrors,
    SeenErrors,
    counted_together,
)
from skipper.control.runtime.history import ErrorGroup
from tests.control.actors import Echo
from tests.control.observe.sources import SourceOf

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 7, in step\n    1 / 0\nKeyError: {}'


def group(
    rank: int, *, error: str = "KeyError", line: int = 7, count: int = 1, at_s: float = 0.0, message: str = "x"
) -> ErrorGroup:
    """An error of an actor, which was seen ``count`` times, from ``at_s`` on once a second."""
    trace = TRACEBACK.format(message).replace("line 7", f"line {line}")
    last_s = at_s + count - 1
    who = f"trainer{{'gpus': {rank}}}.step"
    return ErrorGroup(who, error, f"train.py:{line}", count, at_s, last_s, f"{error}: {message}", trace)


def test_errors_of_several_actors_are_one_kind_if_the_same_calls_led_there() -> None:
    kinds = counted_together(
        [
            group(0, count=3, at_s=10.0, message="of rank 0"),
            group(1, count=2, at_s=5.0, message="of rank 1"),
            group(2, line=8),
            group(3, error="ValueError"),
        ]
    )
    (alike, *others) = kinds
    assert (alike.count, alike.who_total, alike.first_s, alike.last_s) == (5, 2, 5.0, 12.0)
    assert alike.who == ("trainer{'gpus': 0}.step", "trainer{'gpus': 1}.step")  # the latest first
    assert (alike.message, "of rank 1" in alike.traceback) == ("KeyError: of rank 0", True)
    assert {(kind.error, kind.place, kind.count) for kind in others} == {
        ("KeyError", "train.py:8", 1),
        ("ValueError", "train.py:7", 1),
    }


def test_what_is_told_is_bounded() -> None:
    (crowd,) = counted_together(group(rank) for rank in range(1000))
    assert (crowd.count, crowd.who_total, len(crowd.who)) == (1000, 1000, MOST_NAMED)
    many = counted_together(group(0, line=line, at_s=float(line)) for line in range(1000))
    assert [kind.place for kind in many] == [f"train.py:{line}" for line in range(999, 999 - MOST_KINDS, -1)]


def test_errors_of_processes_that_have_ended_are_remembered_and_counted_once() -> None:
    seen = SeenErrors()
    both = [ProcessErrors("a", [group(0)]), ProcessErrors("b", [group(1)])]
    assert seen.note(both)[0].count == 2
    assert seen.note(both[:1])[0].count == 2  # b has ended
    assert seen.note([ProcessErrors("a", [group(0, count=4)])])[0].count == 5
    assert seen.note(both)[0].count == 2  # it only had not answered
    for process in range(KEPT_PROCESSES + 10):
        seen.note([ProcessErrors(f"mortal {process}", [group(0)])])
    assert seen.note([])[0].count == KEPT_PROCESSES


def test_the_overview_asks_for_all_processes_and_a_page_for_one(echoes: ActorMesh[Echo]) -> None:
    kept = [ProcessErrors("a", [group(0)]), ProcessErrors("b", [group(1, count=2)])]
    lookups = DashboardLookups(SourceOf(job_status(), kept))
    (kind,) = json.loads(lookups.answer("/errors.json", {}).body)["groups"]
    assert (kind["count"], kind["who_total"], kind["error"]) == (3, 2, "KeyError")
    (own,) = json.loads(lookups.answer("/errors.json", {"process": "b"}).body)["groups"]
    assert (own["count"], own["who"]) == (2, "trainer{'gpus': 1}.step")
