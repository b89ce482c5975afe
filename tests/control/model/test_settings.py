from collections.abc import Iterator
from typing import Any

import pytest

from skipper import control
from skipper.control.model.settings import Settings, adopt, settings


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = settings()
    yield
    adopt(before)


def test_bounds_are_changed_one_by_one() -> None:
    before = control.configure()
    after = control.configure(heartbeat_s=3.0)
    assert after.heartbeat_s == 3.0
    assert after.stop_timeout_s == before.stop_timeout_s
    assert settings() == after


@pytest.mark.parametrize(("bound", "error"), [(0, ValueError), (-1.0, ValueError), ("1", TypeError), (True, TypeError)])
def test_bad_bounds_are_refused_and_change_nothing(bound: Any, error: type[Exception]) -> None:
    before = settings()
    with pytest.raises(error, match="stop_timeout_s"):
        control.configure(stop_timeout_s=bound)
    assert settings() == before


@pytest.mark.parametrize(
    ("limits", "error", "expected"),
    [
        ({"max_unhandled": 255}, ValueError, "at least 256"),
        ({"max_unhandled": 1000.0}, TypeError, "an int"),
        ({"max_unhandled": "1000"}, TypeError, "an int"),
        ({"max_unhandled_nbytes": 1 << 20}, ValueError, "at least 16777216"),
        ({"send_timeout_s": 0}, ValueError, "positive"),
        ({"send_timeout_s": "1"}, TypeError, "a number of seconds"),
        ({"tree_threshold": 0}, ValueError, "at least 1"),
        ({"tree_fanout": 1}, ValueError, "at least 2"),
        ({"tree_fanout": 8.0}, TypeError, "an int"),
        ({"tree_fanout": True}, TypeError, "an int"),
    ],
)
def test_limits_leave_room_for_what_is_given_back_in_batches(
    limits: dict[str, Any], error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=rf"^{next(iter(limits))} must be {expected}"):
        control.configure(**limits)
    assert control.configure(max_unhandled=256, max_unhandled_nbytes=16 << 20).max_unhandled == 256


def test_a_silent_process_that_is_alive_has_ten_times_the_bound_unless_it_is_said() -> None:
    assert Settings(heartbeat_s=2.0).unresponsive() == 20.0
    assert Settings(heartbeat_s=2.0, unresponsive_s=5.0).unresponsive() == 5.0
    assert Settings(heartbeat_s=2.0, unresponsive_s=1.0).unresponsive() == 2.0
    with pytest.raises(ValueError, match="unresponsive_s must be positive"):
        Settings(unresponsive_s=0)
    with pytest.raises(TypeError, match="unresponsive_s must be a number"):
        Settings(unresponsive_s="long")  # type: ignore[arg-type]
