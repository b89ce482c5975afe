"""Which lines are shown together, in which order, and when: with a clock of the test's."""

from skipper.control.observe.aggregate import MAX_HELD, Aggregator, Line


def texts(lines: list[Line]) -> list[tuple[int, str]]:
    return [(line.alike, line.text) for line in lines]


def test_what_all_say_alike_is_one_line_that_waits_for_nobody() -> None:
    lines = Aggregator(1.0)
    for rank in range(16):
        assert lines.due(0.0, 16) == []
        lines.add(1, f"w {rank}", f"step 3 on rank {rank}: loss 0.{rank}1 at 0x7f{rank:02x}", 0.0)
    assert texts(lines.due(0.0, 16)) == [(16, "step 3 on rank 0: loss 0.01 at 0x7f00")]


def test_a_line_is_held_back_for_the_window_and_no_longer() -> None:
    lines = Aggregator(1.0)
    lines.add(1, "a", "x", 0.0)
    lines.add(1, "b", "x", 0.9)
    assert lines.next_s() == 1.0
    assert lines.due(0.99, 3) == []
    assert lines.due(1.0, 3) == [Line(1, "a", "x", 2)]
    assert lines.next_s() is None
    lines.add(1, "c", "x", 1.1)
    assert texts(lines.due(3.0, 3)) == [(1, "x")]


def test_what_one_process_repeats_stays_repeated() -> None:
    lines = Aggregator(1.0)
    for step in range(3):
        for source in "ab":
            lines.add(1, source, f"step {step}", 0.0)
    assert texts(lines.due(0.0, 2)) == [(2, "step 0"), (2, "step 1"), (2, "step 2")]


def test_the_lines_of_a_process_stay_in_their_order() -> None:
    lines = Aggregator(1.0)
    lines.add(1, "a", "x", 0.0)
    lines.add(1, "b", "y", 0.0)
    lines.add(1, "b", "x", 0.0)  # not with that of a, which stands before y
    lines.add(1, "a", "y", 0.0)
    assert texts(lines.due(1.0, 9)) == [(1, "x"), (2, "y"), (1, "x")]


def test_the_two_streams_are_not_mixed() -> None:
    lines = Aggregator(1.0)
    lines.add(1, "a", "x", 0.0)
    lines.add(2, "b", "x", 0.0)
    assert [(line.stream, line.alike) for line in lines.due(1.0, 9)] == [(1, 1), (2, 1)]


def test_one_process_waits_for_nobody() -> None:
    lines = Aggregator(1.0)
    lines.add(1, "a", "x", 0.0)
    assert texts(lines.due(0.0, 1)) == [(1, "x")]


def test_what_is_held_back_is_bounded() -> None:
    lines = Aggregator(1.0)
    for number in range(MAX_HELD + 5):
        lines.add(1, "a", "line " + "x" * number, 0.0)
    assert len(lines.due(0.0, 9)) == 5


def test_nothing_is_kept_of_lines_that_are_out() -> None:
    lines = Aggregator(0.0)
    for number in range(100):
        lines.add(1, f"source {number}", f"{'x' * number}", 0.0)
        lines.due(0.0, 9)
    assert not lines._of_kind
    assert not lines._last_of
