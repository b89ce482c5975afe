"""Many at once: readers of one buffer, and two processes that move bytes both ways at the same time."""

from collections.abc import Callable, Sequence

import numpy as np

from skipper.dataplane import RDMABuffer
from tests.conformance.conftest import Case
from tests.conformance.owner import Owner, RemoteOwner, replies
from tests.conformance.test_transfers import handle_to, pattern
from tests.sameness import assert_same

READERS = 64


def test_sixty_four_readers_of_one_buffer_all_read_right(owner: Owner, crowd: Sequence[Owner]) -> None:
    content = pattern(200_000)
    _, buffer = handle_to(owner, content)
    for visitor in crowd:
        visitor.tell("read_parts", buffer.serialize(), content, READERS // len(crowd), 4)
    assert replies(crowd) == [0] * len(crowd)


def test_reads_and_writes_in_both_directions_at_once(remote_case: Case, start: Callable[[], RemoteOwner]) -> None:
    nbytes, times = 2 << 20, 8
    other = start()
    theirs, ours = pattern(nbytes, 2), np.frombuffer(pattern(nbytes, 3), np.uint8).copy()
    name, there = handle_to(other, theirs)
    own = RDMABuffer(ours)
    into = np.empty(nbytes, np.uint8)

    other.tell("read", own.serialize(), nbytes, times)
    for _ in range(times):  # both read
        there.read_into(into).get()
        assert_same(into.tobytes(), theirs)
    assert_same(other.reply(), ours.tobytes())

    incoming = pattern(nbytes, 4)
    other.tell("write", own.serialize(), incoming, times)
    outgoing = pattern(nbytes, 5)
    for _ in range(times):  # both write, and we read what we have written
        there.write_from(outgoing).get()
        there.read_into(into).get()
        assert_same(into.tobytes(), outgoing)
    other.reply()
    assert_same(ours.tobytes(), incoming)
    assert_same(other("content", name), outgoing)
