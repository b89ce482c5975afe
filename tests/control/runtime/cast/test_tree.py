"""The arithmetic of trees, and what is said in them beside payloads."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skipper.control import ProtocolError
from skipper.control.runtime.cast.messages import GivenAnswer, Opening, host_starts, pack_answers, unpack_answers
from skipper.control.runtime.cast.order import moved_at, runs
from skipper.control.runtime.cast.relay import cast_for
from skipper.control.runtime.cast.tree import RankSpan, Tree
from skipper.control.wire.bulk import Outgoing
from skipper.control.wire.frames import Decoder, encode
from skipper.control.wire.messages import Call, Cast, CastAnswers, Entry, Kind, RouteOpened
from skipper.control.wire.process_ref import ProcessRef
from tests.control.wire.plain import plain

ROOT = ProcessRef("job-1", "unix-abstract:root", "script")
HOST = ProcessRef("job-2", "unix-abstract:host", "hôte", ROOT)
SIZES, FANOUTS = st.integers(0, 700), st.integers(2, 40)


def nodes(first: int, end: int) -> list[tuple[int, ProcessRef]]:
    return [(10 + n, ProcessRef(f"job-x{n}", f"unix-abstract:{n}", f"p[{n}]", HOST)) for n in range(first, end)]


@settings(max_examples=60)
@given(SIZES, FANOUTS)
def test_everybody_gets_it_once_from_the_one_above(size: int, fanout: int) -> None:
    tree = Tree(size, fanout)
    passed_on: list[int] = [span.first for span in tree.heads]
    for position in range(size):
        below = tree.span_at[position].below(fanout)
        assert len(below) <= fanout
        assert all(tree.parent_of[span.first] == position for span in below)
        passed_on += [span.first for span in below]
    assert sorted(passed_on) == list(range(size))
    assert all(tree.parent_of[span.first] is None for span in tree.heads)
    assert len(tree.heads) <= fanout


@settings(max_examples=60)
@given(st.integers(1, 700), FANOUTS)
def test_it_is_hardly_deeper_than_it_has_to_be(size: int, fanout: int) -> None:
    level, reached, least = 1, 0, 0
    while reached < size:
        level, least = level * fanout, least + 1
        reached += level
    assert least <= Tree(size, fanout).depth <= least + 1


def test_32768_ranks_are_five_links_away() -> None:
    tree = Tree(32_768, 8)
    assert tree.depth == 5
    assert max(len(span.below(8)) for span in tree.span_at) == 8
    assert math.log(32_768, 8) == pytest.approx(5)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), FANOUTS)
@example([1] * 14 + [2], 2)  # a node whose own host ends with it, and all below it are on another
def test_a_cast_goes_to_each_host_once_and_everybody_cuts_alike(hosts: list[int], fanout: int) -> None:
    starts = [sum(hosts[:host]) for host in range(len(hosts))]
    host_of = [host for host, size in enumerate(hosts) for _ in range(size)]
    tree = Tree(sum(hosts), fanout, starts)
    assert {span.first for span in tree.heads} <= {0, *starts} or len(hosts) == 1
    assert sum(map(len, tree.heads)) == sum(hosts)
    if len(hosts) > 1:
        arrivals = [
            host_of[position]
            for position, parent in enumerate(tree.parent_of)
            if parent is None or host_of[parent] != host_of[position]
        ]
        assert sorted(arrivals) == list(range(len(hosts)))
    row = [(at, ProcessRef(f"job-{at}", f"10.0.0.{host}:0", "p", HOST)) for at, host in enumerate(host_of)]
    for position, span in enumerate(tree.span_at):
        below = span.below(fanout, host_starts(row[span.first : span.end], span.first))
        assert below == tree.below(position)
        assert len(below) <= fanout
        assert all(tree.parent_of[child.first] == position for child in below)


@settings(max_examples=60)
@given(st.integers(1, 300), st.integers(1, 16), st.integers(2, 16))
def test_hosts_make_it_little_deeper(hosts: int, each: int, fanout: int) -> None:
    def least(size: int) -> int:
        return Tree(size, fanout).depth

    tree = Tree(hosts * each, fanout, range(0, hosts * each, each))
    assert tree.depth <= least(hosts) + least(each) + 1


def test_where_hosts_begin_is_known() -> None:
    def row(*addresses: str) -> list[tuple[int, ProcessRef]]:
        return [(n, ProcessRef(f"job-{n}", address, "p", HOST)) for n, address in enumerate(addresses)]

    assert host_starts(row("unix-abstract:a", "10.0.0.1:0", "10.0.0.1:7", "10.0.0.2:0")) == [0, 1, 3]
    assert host_starts(row("10.0.0.1:0", "10.0.0.2:0", "10.0.0.1:0"), 7) == [7, 8, 9]
    assert host_starts([]) == []


def test_a_tree_has_to_branch() -> None:
    with pytest.raises(ValueError, match="fan-out of 2"):
        Tree(10, 1)


@settings(max_examples=60)
@given(st.dictionaries(st.integers(0, 99), st.integers(1, 5), max_size=9), st.integers(0, 50), st.integers(1, 50))
def test_a_cast_for_a_subtree_says_to_it_what_was_said_beside_the_route(
    moved: dict[int, int], first: int, size: int
) -> None:
    span = RankSpan(first, first + size)
    moves = list(runs(moved))
    assert {at: moved_at(moves, at) for at in range(100)} == {at: moved.get(at, 0) for at in range(100)}
    (frame,) = encode([cast_for(span, 1 << 61, 7, 3, moves, Call(5, 9, method="step", payload=(b"args",)))])
    (cast,) = Decoder().feed(frame)
    assert isinstance(cast, Cast)
    assert {at: moved_at(cast.moves, at) for at in range(first, first + size)} == {
        at: moved.get(at, 0) for at in range(first, first + size)
    }
    assert len(cast.moves) <= len(moves) <= len(moved)
    assert (cast.route, cast.number, cast.settled) == (1 << 61, 7, 3)
    assert plain(cast.call_for(4)) == Call(5, 9, 4, "step", payload=(b"args",))


def test_an_opening_arrives_as_it_was_and_can_be_cut_up() -> None:
    starts = [(n, n % 2 == 0) for n in range(16)]
    opening = Opening(9, ROOT, 3, RankSpan(4, 20), 17, nodes(4, 20), starts)
    there = Opening.of(opening.message())
    assert there == opening
    assert there.nodes[0][1].launcher == HOST
    assert Opening.of(there.part(RankSpan(6, 8)).message()) == Opening(
        9, ROOT, 3, RankSpan(6, 8), 17, nodes(6, 8), starts[2:4]
    )


def test_replies_are_bundled_as_they_are() -> None:
    answers = [
        GivenAnswer(3, Kind.REPLY, (b"a", memoryview(b"bc"))),
        GivenAnswer(5, Kind.FAILURE, (b"",)),
        GivenAnswer(4, Kind.REPLY, ()),
    ]
    message = pack_answers(11, 12, 9, answers, is_home=True)
    assert (message.route, message.number, message.port) == (11, 12, 9)
    assert unpack_answers(message) == answers


GARBAGE = [b"", b"x", b"\xff" * 20, b"[1,2]", b'[[1,0,2,0,1,0],[["a","b","c",7]],[[0,0]]]', b"[" * 5000]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_is_an_error_of_the_protocol(garbage: bytes) -> None:
    with pytest.raises(ProtocolError):
        Opening.of(RouteOpened(payload=(garbage,)))


@pytest.mark.parametrize("entries", [(), ((0, 2, 2),), ((0, 2, 1), (1, 2, 1)), ((0, 1, 1),), ((0, 200, 1),)])
def test_answers_that_do_not_fit_their_segments_are_an_error_of_the_protocol(entries: tuple[Entry, ...]) -> None:
    with pytest.raises(ProtocolError, match=r"of kind|of the wrong size"):
        unpack_answers(CastAnswers(1, 2, 3, is_home=False, entries=entries, payload=(b"result",)))


def test_openings_are_not_lent() -> None:
    with pytest.raises(ProtocolError, match="lent"):
        Opening.of(RouteOpened(payload=(Outgoing(b"12345"),)))
