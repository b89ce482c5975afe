from collections.abc import Iterator
from typing import Any

import pytest

import control
from control.settings import adopt, settings


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
    ("limits", "error"),
    [
        ({"max_unhandled": 255}, ValueError),
        ({"max_unhandled": 1000.0}, TypeError),
        ({"max_unhandled_nbytes": 1 << 20}, ValueError),
        ({"send_timeout_s": 0}, ValueError),
        ({"tree_threshold": 0}, ValueError),
        ({"tree_fanout": 1}, ValueError),
        ({"tree_fanout": 8.0}, TypeError),
    ],
)
def test_limits_leave_room_for_what_is_given_back_in_batches(limits: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(limits))):
        control.configure(**limits)
    assert control.configure(max_unhandled=256, max_unhandled_nbytes=16 << 20).max_unhandled == 256
