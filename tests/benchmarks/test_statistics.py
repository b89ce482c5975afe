import math
import random
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipper.benchmarks.statistics import (
    STRETCHES,
    Contestant,
    Samples,
    Schedule,
    WholeRounds,
    interleave,
    median_interval,
    percentile,
    stretches,
    summarize,
)

finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
samples = st.lists(finite, min_size=1, max_size=300)
ranks = st.decimals(min_value="0.001", max_value=100, places=3).map(float)


@given(samples, ranks)
def test_percentile_is_the_least_sample_that_reaches_its_rank(values: list[float], rank: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, rank)
    share = Fraction(str(rank)) / 100
    assert found in ordered
    assert sum(value <= found for value in ordered) >= share * len(ordered)
    assert sum(value < found for value in ordered) < share * len(ordered)


def test_percentile_of_an_exact_rank_is_not_moved_up_by_binary_rounding() -> None:
    assert math.ceil(7 / 100 * 100) == 8
    assert percentile(range(1, 101), 7) == 7
    assert percentile(range(1, 1001), 99.9) == 999


def test_high_percentile_of_few_samples_is_the_largest() -> None:
    assert percentile([1, 2, 3], 99) == 3


@pytest.mark.parametrize("rank", [0, -1, 100.1, math.nan])
def test_percentile_refuses_a_rank_out_of_range(rank: float) -> None:
    with pytest.raises(ValueError, match="rank"):
        percentile([1.0], rank)


def test_no_samples_have_no_statistics() -> None:
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


@given(samples)
def test_summary_is_ordered_and_does_not_depend_on_the_order_of_samples(values: list[float]) -> None:
    summary = summarize(values)
    assert summary == summarize(values[::-1])
    assert summary.min <= summary.p50 <= summary.p99 <= summary.p99_9 <= summary.max
    assert (summary.n, summary.min, summary.max) == (len(values), min(values), max(values))


blocks = st.lists(st.lists(st.integers(0, 10**12), max_size=20), min_size=1, max_size=30)


@given(blocks, st.integers(2, 16))
def test_samples_keep_exact_totals_and_an_even_spread_in_bounded_memory(taken: list[list[int]], limit: int) -> None:
    kept = Samples(limit=limit)
    for block in taken:
        kept.extend(block)
    everything = [duration for block in taken for duration in block]
    assert kept.count == len(everything)
    assert kept.total_ns == sum(everything)
    if everything:
        assert (kept.min_ns, kept.max_ns) == (min(everything), max(everything))
        stride = 1
        while len(everything[::stride]) > limit:
            stride *= 2
        assert kept.kept_ns() == everything[::stride]


def test_samples_below_the_limit_are_all_kept() -> None:
    kept = Samples()
    kept.extend([3, 1, 2])
    kept.extend([])
    kept.extend([9])
    assert kept.kept_ns() == [3, 1, 2, 9]


class Track:
    """Contestants that write down when they ran, on a clock that each run moves on by its own cost."""

    def __init__(self) -> None:
        self.now = 0
        self.ran: list[str] = []

    def clock(self) -> int:
        return self.now

    def contestant(self, name: str, cost: int) -> Contestant:
        def run() -> None:
            self.now += cost
            self.ran.append(name)

        return Contestant(name, run)


def test_interleaving_takes_turns_and_rotates_who_begins() -> None:
    track = Track()
    pair = [track.contestant("a", 5), track.contestant("b", 7)]
    times = interleave(pair, Schedule(iterations=4, block=1, warmup=1), clock=track.clock)
    assert "".join(track.ran) == "ab" + "ab" + "ba" + "ab" + "ba"
    assert times["a"].kept_ns() == [5] * 4
    assert times["b"].kept_ns() == [7] * 4


def test_a_block_begins_with_an_untimed_run_and_the_last_one_is_shorter() -> None:
    track = Track()
    times = interleave([track.contestant("a", 5)], Schedule(iterations=5, block=3, warmup=0), clock=track.clock)
    assert times["a"].count == 5
    assert len(track.ran) == (1 + 3) + (1 + 2)


@given(iterations=st.integers(1, 50), block=st.integers(1, 12), warmup=st.integers(0, 5), count=st.integers(1, 4))
def test_every_contestant_gets_exactly_the_iterations(iterations: int, block: int, warmup: int, count: int) -> None:
    track = Track()
    field = [track.contestant(str(index), index + 1) for index in range(count)]
    schedule = Schedule(iterations=iterations, block=block, warmup=warmup)
    times = interleave(field, schedule, clock=track.clock)
    assert {name: kept.count for name, kept in times.items()} == {c.name: iterations for c in field}


def test_a_duration_ends_after_the_round_in_which_it_passed() -> None:
    track = Track()
    pair = [track.contestant("a", 300_000_000), track.contestant("b", 300_000_000)]
    times = interleave(pair, Schedule(duration_s=1.0, block=1, warmup=0), clock=track.clock)
    assert times["a"].count == times["b"].count == 2


def test_a_duration_shorter_than_one_round_still_measures_one() -> None:
    track = Track()
    times = interleave([track.contestant("a", 10**9)], Schedule(duration_s=1e-6, warmup=0), clock=track.clock)
    assert times["a"].count == 1


def test_after_round_is_called_after_the_warm_up_and_each_round() -> None:
    track = Track()
    calls: list[int] = []
    interleave(
        [track.contestant("a", 1)],
        Schedule(iterations=4, block=2, warmup=3),
        clock=track.clock,
        after_round=lambda: calls.append(len(track.ran)),
    )
    assert calls == [3, 6, 9]


def test_what_a_contestant_raises_passes_through() -> None:
    def fail() -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        interleave([Contestant("a", fail)], Schedule(iterations=1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Schedule(),
        lambda: Schedule(iterations=0),
        lambda: Schedule(duration_s=0.0),
        lambda: Schedule(iterations=1, block=0),
        lambda: Schedule(iterations=1, warmup=-1),
        lambda: Samples(limit=1),
        lambda: interleave([], Schedule(iterations=1)),
        lambda: interleave([Contestant("a", int), Contestant("a", int)], Schedule(iterations=1)),
    ],
)
def test_impossible_measurements_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        make()


@pytest.mark.parametrize(("n", "rank"), [(6, 1), (8, 1), (9, 2), (20, 6), (32, 10)])
def test_the_interval_of_a_median_has_the_ranks_of_the_tables(n: int, rank: int) -> None:
    assert median_interval(range(1, n + 1)) == (rank, n + 1 - rank)


def test_five_samples_are_too_few_for_an_interval() -> None:
    assert median_interval([1.0] * 5) is None
    assert median_interval([]) is None


def test_the_interval_covers_the_true_median_as_often_as_it_says() -> None:
    draw = random.Random(7)
    covered = 0
    for _ in range(2000):
        low, high = median_interval([draw.expovariate(1) for _ in range(15)]) or (0, 0)
        covered += low <= math.log(2) <= high
    assert 0.95 <= covered / 2000 <= 0.98  # 0.9648 by the binomial distribution


@given(samples)
def test_stretches_are_medians_of_the_whole_run_in_order(values: list[float]) -> None:
    found = stretches(values)
    assert len(found) == min(STRETCHES, len(values))
    assert found == values or len(values) > STRETCHES
    assert set(found) <= set(values)


def test_figures_count_once_their_round_is_whole_and_not_those_of_the_warm_up() -> None:
    kept: dict[str, list[int]] = {}
    told: list[int] = []
    rounds = WholeRounds(kept, told.append)
    number = iter(range(100))

    def block(name: str) -> None:
        if (taken := next(number)) == 9:
            raise KeyboardInterrupt
        rounds.note(name, [taken])

    field = [Contestant("a", lambda: block("a")), Contestant("b", lambda: block("b"))]
    with pytest.raises(KeyboardInterrupt):
        interleave(field, Schedule(iterations=20, warmup=2), after_round=rounds.end_round)
    assert (kept, told) == ({"a": [4, 7], "b": [5, 6]}, [1, 2]), "the tenth block cut the third round short"
