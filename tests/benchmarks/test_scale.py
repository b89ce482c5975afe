import pytest

from skipper.benchmarks.scale.command import main
from skipper.benchmarks.scale.model import (
    ANSWERS_NBYTES,
    CALL_NBYTES,
    CAST_NBYTES,
    ENTRY_NBYTES,
    REPLY_NBYTES,
    SEGMENT_NBYTES,
    Costs,
    latency_us,
    traffic,
)
from skipper.control.runtime.cast.messages import GivenAnswer, pack_answers
from skipper.control.runtime.cast.relay import cast_for
from skipper.control.runtime.cast.tree import RankSpan
from skipper.control.wire.frames import encode
from skipper.control.wire.messages import Call, Kind, Reply

from .quick import quick_run

COSTS = Costs(call_us=10, message_us=4, rank_us=1, handle_us=20, wire_us=100)


def test_a_quick_run_measures_both_ways_and_models_more_ranks() -> None:
    report, told = quick_run("skipper.benchmarks.scale", "--fanout", "2", "--ranks", "1024")
    assert report.config["limit"] == "as many as asked for"
    measured = [row for row in report.results if row.name == "call_us"]
    assert {(row.parameters["ranks"], row.parameters["way"]) for row in measured} == {
        (ranks, way) for ranks in (4, 6) for way in ("straight", "tree")
    }
    assert all(row.reference is not None and "model_error" in row.parameters for row in measured)
    beyond = [row for row in report.results if row.name == "modelled_call_us"]
    assert {row.parameters["ranks"] for row in beyond} == {8, 16, 32, 64, 128, 256, 512, 1024}
    assert "processes (as many as asked for)" in told


def test_one_rank_takes_one_of_everything() -> None:
    assert latency_us(1, None, COSTS, cores=None) == 10 + 2 + 100 + 20 + 100 + 2 + 1
    assert latency_us(1, 8, COSTS, cores=1) == latency_us(1, None, COSTS, cores=None)


def test_on_one_core_all_work_is_done_one_after_the_other() -> None:
    costs = Costs(call_us=0, message_us=4, rank_us=1, handle_us=20, wire_us=0)
    assert latency_us(50, None, costs, cores=1) == 50 * (4 + 20 + 1)
    assert latency_us(50, 3, costs, cores=1) == 50 * (4 + 20 + 1)  # a tree saves no work, it spreads it


def test_a_tree_takes_about_as_long_as_it_is_deep() -> None:
    straight, tree = (latency_us(32_768, fanout, COSTS, cores=None) for fanout in (None, 8))
    assert straight > 32_768 * 4
    assert tree < 5 * (2 * 100 + 8 * 4) + 20 + 10 + 32_768 * 1 + 100
    assert latency_us(32_768, 8, Costs(10, 4, 0, 20, 100), cores=None) < straight / 50


def test_messages_are_counted_as_they_are_sent() -> None:
    message = traffic(64, 8, argument_nbytes=100, result_nbytes=50, text_nbytes=10)
    assert (message.depth, message.messages, message.caster_messages, message.most_messages) == (2, 128, 16, 16)
    straight = traffic(64, None, argument_nbytes=100, result_nbytes=50, text_nbytes=10)
    assert (straight.caster_messages, straight.most_messages) == (128, 2)


def test_the_sizes_of_the_model_are_those_on_the_wire() -> None:
    tag = 1
    arguments, result = bytes(100), bytes(50)
    call = Call(1, 2, method="echo", payload=(arguments,))
    assert sum(map(len, encode([call]))) == tag + CALL_NBYTES + 4 + 100
    assert sum(map(len, encode([Reply(2, payload=(result,))]))) == tag + REPLY_NBYTES + 50
    assert sum(map(len, encode([cast_for(RankSpan(0, 4), 1, 2, 3, (), call)]))) == tag + CAST_NBYTES + 4 + 100
    answers = pack_answers(1, 7, 2, [GivenAnswer(n, Kind.REPLY, (result,)) for n in range(3)], is_home=True)
    assert sum(map(len, encode([answers]))) == tag + ANSWERS_NBYTES + 3 * (ENTRY_NBYTES + SEGMENT_NBYTES + 50)


def test_a_wrong_command_line_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--procs", "3"]) == 2
    assert main(["--json", "/nowhere/at/all.json"]) == 2
    assert "skipper scale:" in capsys.readouterr().err
