"""From bytes to lines: ends of lines, bars of progress, sequences for terminals, labels, and what is shown once."""

import pytest

from skipper.control.observe.log_lines import (
    BAR_S,
    IDLE_S,
    MAX_HELD,
    MAX_LINE_NBYTES,
    SHOWN_APART,
    Aggregator,
    Line,
    LineBudget,
    LineSplitter,
    label_of,
    shown,
)

# Whose a line is


@pytest.mark.parametrize(
    ("name", "actors", "label"),
    [
        ("workers{'gpus': 3}", (), "workers gpus=3"),
        ("a{'hosts': 1, 'gpus': 12}", ("trainers",), "trainers hosts=1 gpus=12"),
        ("workers{'gpus': 3}", ("trainers", "samplers"), "workers gpus=3"),
        ("procs{'gpus': 3}", ("trainers", "samplers"), "trainers+samplers gpus=3"),
        ("procs", (), "procs"),
        ("store", ("volume",), "volume"),
    ],
)
def test_labels_are_in_the_words_of_who_spawned(name: str, actors: tuple[str, ...], label: str) -> None:
    assert label_of(name, actors) == label


# What of it a terminal gets


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (b"plain", "plain"),
        (b"a\tb", "a\tb"),
        (b"done\r", "done"),
        (b" 10 %\r 20 %", " 20 %"),
        (b"\x1b[31mred", "\x1b[31mred\x1b[0m"),
        (b"\x1b[2J\x1b[Hgone", "gone"),
        (b"\x1b]0;title\x07text", "text"),
        (b"\x1b]52;c;ZWNobw==\x1b\\text", "text"),
        (b"\x1bP+q544e\x1b\\text", "text"),
        (b"\x1b]8;;never ends", ""),
        (b"\x1b[?1049hx\x1bc", "x"),
        (b"bell\x07 \x9b2J", "bell\ufffd \ufffd2J"),
        ("\x9b2J\u202etxt".encode(), "\ufffd2J\ufffdtxt"),
        (b"end \x1b", "end "),
        (b"\xff\xfe", "\ufffd\ufffd"),
        ("größer".encode(), "größer"),
    ],
)
def test_nothing_moves_about_on_the_terminal(written: bytes, text: str) -> None:
    assert shown(written) == text


def test_lines_are_made_of_pieces() -> None:
    lines = LineSplitter()
    assert lines.feed(b"one\ntw", 0.0, 1) == ["one"]
    assert lines.feed(b"o\n\nthree", 0.0, 2) == ["two", ""]
    assert lines.end() == "three"
    assert lines.end() is None


def test_lines_for_which_there_is_no_room_are_forgotten_with_what_began_them() -> None:
    lines = LineSplitter()
    assert lines.feed(b"begun", 0.0, 0) == []
    assert lines.feed(b" ended\ntwo\nthree\nfo", 0.0, 0) == []
    assert lines.feed(b"ur\nfive\n", 0.0, 1) == ["four"]
    assert lines.end() is None


def test_a_prompt_is_shown_once_it_is_idle_and_only_once() -> None:
    lines = LineSplitter()
    lines.feed(b"password: ", 1.0, 0)
    assert lines.overdue(1.0 + IDLE_S / 2) is None
    assert lines.due_s() == 1.0 + IDLE_S
    assert lines.overdue(1.0 + IDLE_S) == "password: "
    assert lines.due_s() == float("inf")
    assert lines.feed(b"\nnext\n", 2.0, 2) == ["next"]


def test_a_bar_of_progress_is_shown_from_time_to_time_and_when_it_is_complete() -> None:
    lines, out = LineSplitter(), []
    for step in range(101):
        now_s = step / 10
        lines.feed(f"\r{step} %".encode(), now_s, 0)
        if (text := lines.overdue(now_s)) is not None:
            out.append(text)
    assert len(out) == 10 / BAR_S + 1
    assert lines.feed(b"\r100 %, done\n", 10.0, 1) == ["100 %, done"]


def test_what_is_held_of_a_line_is_bounded() -> None:
    lines = LineSplitter()
    for _ in range(100):
        lines.feed(bytes(1 << 16), 0.0, 0)
    (text,) = lines.feed(b"\nnext", 0.0, 1)
    assert len(text) < MAX_LINE_NBYTES + 100
    assert text.endswith(f" … {100 * (1 << 16) - MAX_LINE_NBYTES:,} bytes more")
    assert lines.end() == "next"


# How many


def test_a_budget_allows_bursts_and_so_many_a_second_in_the_long_run() -> None:
    budget = LineBudget(10.0)
    assert budget.admit(5000, 100, 0.0) == 1000
    assert budget.admit(1, 100, 0.0) == 0
    assert sum(budget.admit(1000, 100, 0.0 + second) for second in range(1, 11)) == 1000
    assert budget.admit(5000, 100, 1000.0) == 1000


def test_a_flood_is_one_as_long_as_more_comes_than_may_be_shown() -> None:
    budget = LineBudget(10.0)
    budget.admit(1000, 100, 0.0)
    budget.admit(500, 100, 1.0)
    assert not budget.is_flooded  # all could be shown until then
    budget.admit(500, 100, 2.0)
    assert budget.is_flooded
    for second in range(3, 30):
        budget.admit(150, 100, float(second))
        assert budget.is_flooded
    budget.admit(50, 100, 30.0)
    budget.admit(50, 100, 31.0)
    assert not budget.is_flooded


def test_a_part_of_the_budget_is_reserved() -> None:
    budget = LineBudget(10.0)
    assert budget.admit(5000, 100, 0.0, reserved=0.25) == 750
    assert budget.admit(5000, 100, 0.0) == 250


# Which lines are shown together, in which order, and when: with a clock of the test's.


def texts(lines: list[Line]) -> list[tuple[int, str]]:
    return [(line.alike, line.text) for line in lines]


def test_what_many_say_with_other_numbers_is_one_line_that_waits_for_nobody() -> None:
    lines = Aggregator(1.0)
    for rank in range(16):
        assert lines.due(0.0, 16) == []
        lines.add(1, f"w gpus={rank}", f"step 3 on rank {rank}: loss 0.{rank}1 at 0x7f{rank:02x}", 0.0)
    (line,) = lines.due(0.0, 16)
    assert texts([line]) == [(16, "step 3 on rank 0: loss 0.01 at 0x7f00")]
    assert line.prefix() == "w gpus=0 and 15 alike"


def test_what_few_say_with_other_numbers_is_shown_of_each() -> None:
    lines = Aggregator(1.0)
    for rank in range(SHOWN_APART):
        lines.add(1, f"w gpus={rank}", f"loss {rank}", 0.0)
    assert texts(lines.due(0.0, SHOWN_APART)) == [(1, f"loss {rank}") for rank in range(SHOWN_APART)]


def test_the_same_line_is_shown_once_with_how_many_said_so() -> None:
    lines = Aggregator(1.0)
    for mesh in ("trainers", "samplers"):
        for rank in range(8):
            lines.add(1, f"{mesh} hosts=0 gpus={rank}", "ready", 0.0)
    (line,) = lines.due(0.0, 16)
    assert (line.text, line.prefix()) == ("ready", "trainers+samplers x16")


def test_of_many_meshes_three_are_named() -> None:
    assert Line(1, "a", "x", 9, ("a", "b", "c", "d", "e")).prefix() == "a+b+c+2 x9"


def test_a_line_is_held_back_for_the_window_and_no_longer() -> None:
    lines = Aggregator(1.0)
    lines.add(1, "a", "x", 0.0)
    lines.add(1, "b", "x", 0.9)
    assert lines.next_s() == 1.0
    assert lines.due(0.99, 3) == []
    assert lines.due(1.0, 3) == [Line(1, "a", "x", 2, ("a", "b"))]
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


def test_what_a_process_says_on_one_stream_keeps_nothing_of_the_other_apart() -> None:
    lines = Aggregator(1.0)
    for stream, source in ((1, "a"), (2, "a"), (2, "b"), (1, "b")):
        lines.add(stream, source, "x", 0.0)
    assert [(line.stream, line.alike) for line in lines.due(0.0, 2)] == [(1, 2), (2, 2)]


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
