"""Errors that are alike are one group, with its count and one traceback; groups are bounded."""

import pytest

from skipper.control.runtime import history
from skipper.control.runtime.history import KEPT_GROUPS, MOST_TRACEBACK, FaultHistory


def raised(function: object, *args: object) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (each test raises its own)
        function(*args)  # type: ignore[operator]
    return caught.value


def divide(number: int) -> float:
    return number / 0


def convert(text: str) -> int:
    return int(text)


def test_errors_of_one_class_and_line_are_counted_and_others_apart() -> None:
    faults = FaultHistory()
    for text in ("a", "b", "c"):
        faults.failed("trainer.step", raised(convert, text))
    faults.failed("trainer.step", raised(divide, 1))
    faults.failed("trainer.load", raised(convert, "d"))
    groups = faults.groups()
    assert [(group.who, group.error, group.count) for group in groups] == [
        ("trainer.step", "ValueError", 3),
        ("trainer.step", "ZeroDivisionError", 1),
        ("trainer.load", "ValueError", 1),
    ]
    first = groups[0]
    assert first.message == "ValueError: invalid literal for int() with base 10: 'c'"
    assert "return int(text)" in first.traceback
    assert "'a'" in first.traceback
    assert first.place.startswith(f"{__file__}:")
    assert first.first_s <= first.last_s
    assert faults.errors_total == 5


def test_a_traceback_is_made_once_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[BaseException] = []

    def describe(error: BaseException) -> str:
        described.append(error)
        return "a traceback"

    monkeypatch.setattr(history, "describe", describe)
    faults = FaultHistory()
    for _ in range(100):
        faults.failed("trainer.step", raised(divide, 1))
    assert len(described) == 1


def test_the_kind_that_was_not_seen_for_longest_makes_way_and_long_texts_are_cut() -> None:
    faults = FaultHistory()
    for number in range(KEPT_GROUPS):
        faults.failed(f"actor.{number}", ValueError("x" * (4 * MOST_TRACEBACK)))
    faults.failed("actor.0", ValueError("again"))
    faults.failed("actor.new", ValueError("new"))
    groups = faults.groups()
    assert len(groups) == KEPT_GROUPS
    assert [group.who for group in groups[-2:]] == ["actor.0", "actor.new"]
    assert groups[0].who == "actor.2"
    assert all(len(group.traceback) + len(group.message) < 2 * MOST_TRACEBACK + 200 for group in groups)


def test_an_exception_that_was_never_raised_has_no_place() -> None:
    faults = FaultHistory()
    faults.failed("actor.step", ValueError("made, not raised"))
    (group,) = faults.groups()
    assert (group.place, group.message) == ("", "ValueError: made, not raised")
