"""When a link sends: single messages at once, as those of ends that take turns, and those of a burst together."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from skipper.control.wire import link as link_module
from skipper.control.wire.frames import Decoder, encode
from skipper.control.wire.link import Link
from skipper.control.wire.messages import NOTICE, Call, Reply
from skipper.control.wire.process_ref import ProcessRef


class Clock:
    """Instead of the system's."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Outside:
    """A stream that takes everything; ``frames`` are the ranks in what was sent."""

    max_nbytes = 1 << 16
    flows = False

    def __init__(self) -> None:
        self.user: object = None
        self.frames: list[list[int]] = []
        self.flushes: list[Callable[[], object]] = []

    def send(self, message: bytes) -> bool:
        self.frames.append([call.rank for call in Decoder().feed(message) if isinstance(call, Call)])
        return True

    def flush_soon(self, flush: Callable[[], object]) -> bool:
        self.flushes.append(flush)
        return True

    def receive(self) -> None:
        """Nothing comes."""

    def end(self) -> None:
        """It has no end."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(link_module, "_now", clock)
    return clock


@pytest.fixture
def opened(clock: Clock) -> tuple[Link, Outside]:
    link, outside = Link(ProcessRef("id", "unix:x", "peer"), lambda *_: None, lambda *_: None), Outside()
    link.open(outside)
    return link, outside


def post(link: Link, clock: Clock, count: int, *, apart_s: float, reply_to: int) -> None:
    for rank in range(count):
        link.post(Call(1, reply_to, rank))
        clock.now_s += apart_s


def answer(link: Link) -> None:
    for piece in encode([Reply(7, 0, payload=(b"",))]):
        link.received(piece)


@pytest.mark.parametrize(
    ("reply_to", "apart_s"),
    [(7, 40e-6), (NOTICE + 7, 40e-6), (NOTICE + 7, 400e-6)],
    ids=["calls", "casts", "slow casts"],
)
def test_messages_of_a_burst_leave_together(
    opened: tuple[Link, Outside], clock: Clock, reply_to: int, apart_s: float
) -> None:
    link, outside = opened
    post(link, clock, 5, apart_s=apart_s, reply_to=reply_to)
    assert outside.frames == [[0]]  # nobody knew then that there would be more
    (flush,) = outside.flushes
    flush()
    assert outside.frames == [[0], [1, 2, 3, 4]]


def test_a_burst_does_not_wait_for_its_end(opened: tuple[Link, Outside], clock: Clock) -> None:
    link, outside = opened
    post(link, clock, 80, apart_s=10e-6, reply_to=NOTICE + 1)
    assert [len(frame) for frame in outside.frames] == [1, 32, 32]


@pytest.mark.parametrize(("reply_to", "apart_s"), [(7, 400e-6), (NOTICE + 7, 2e-3)], ids=["calls", "casts"])
def test_single_messages_leave_at_once(
    opened: tuple[Link, Outside], clock: Clock, reply_to: int, apart_s: float
) -> None:
    link, outside = opened
    post(link, clock, 3, apart_s=apart_s, reply_to=reply_to)
    assert outside.frames == [[0], [1], [2]]
    assert outside.flushes == []


def test_calls_that_are_answered_one_by_one_leave_at_once_however_quick_they_are(
    opened: tuple[Link, Outside], clock: Clock
) -> None:
    link, outside = opened
    for _ in range(5):
        post(link, clock, 1, apart_s=20e-6, reply_to=7)
        answer(link)
    assert outside.frames == [[0]] * 5
    assert outside.flushes == []


def test_answers_that_come_now_and_then_do_not_break_up_a_burst(opened: tuple[Link, Outside], clock: Clock) -> None:
    link, outside = opened
    for _ in range(3):
        post(link, clock, 10, apart_s=10e-6, reply_to=7)
        answer(link)
    assert outside.frames == [[0]]
    (flush,) = outside.flushes
    flush()
    assert [len(frame) for frame in outside.frames] == [1, 29]
