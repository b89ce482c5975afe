"""What a word says of the memory that it guards, as another thread sees both: see docs/explanation/memory_order.md.

These are litmus tests. The first shape also fails under ThreadSanitizer (`make test-tsan`) when the word is stored or
loaded with less order than it needs, on any processor: for that its reader must not take the interpreter lock between
the word and the data, which would order them as well. The second is about fences, and about memory that is read while
it is being written; it can fail only where it runs.
"""

import threading

import numpy as np
import pytest

from skipper.dataplane._copy import CHANGED, OK, GuardedRows, copy, guarded_copy, store_word
from skipper.dataplane.allocation import empty_array
from skipper.dataplane.layout import single

NBYTES = 16 << 10  # so much that it is copied without the interpreter lock
LARGE_NBYTES = 256 << 10  # and so much that a copy often meets a drop
ROUNDS = 20
NO_PIDFD = -1
SCANNED = 100_000  # words that are looked at before the one that counts: time for the other thread to write


@pytest.mark.parametrize("stream", [False, True], ids=["cached", "past the cache"])
def test_who_sees_the_word_sees_the_data_that_was_written_before_it(stream: bool) -> None:
    words = empty_array(2, np.uint64)  # one that has its number from the beginning, and one that gets it
    words[:] = 1, 0
    data, fresh, found = (empty_array(NBYTES, np.uint8) for _ in range(3))
    at = np.full(SCANNED, words.ctypes.data, np.uint64)
    at[-1] += np.uint64(8)
    for turn in range(1, ROUNDS + 1):
        expected = np.ones(SCANNED, np.uint64)
        expected[-1] = turn
        fresh[:] = turn
        rows = single(data.ctypes.data, found.ctypes.data, NBYTES)
        reads = GuardedRows(rows, NBYTES, at, expected, True, NO_PIDFD)
        begun = threading.Event()

        def publish(turn: int = turn, begun: threading.Event = begun) -> None:
            begun.wait()
            copy(data.ctypes.data, fresh.ctypes.data, NBYTES, stream)
            store_word(words.ctypes.data + 8, turn)

        writer = threading.Thread(target=publish)
        writer.start()
        begun.set()
        while not reads.copy():
            pass
        assert (found == turn).all()
        writer.join()


def test_who_finds_the_word_unchanged_has_read_nothing_newer() -> None:
    words = empty_array(1, np.uint64)
    data, found = (empty_array(LARGE_NBYTES, np.uint8) for _ in range(2))
    seen = {OK: 0, CHANGED: 0}
    stop = threading.Event()

    def drop_and_use_again() -> None:
        """As an owner does: the number changes, then the memory has other content."""
        fresh = empty_array(LARGE_NBYTES, np.uint8)
        number = 0
        while not stop.is_set():
            number += 1
            store_word(words.ctypes.data, number)
            fresh[:] = number % 251
            copy(data.ctypes.data, fresh.ctypes.data, LARGE_NBYTES)

    data[:] = words[:] = 0
    owner = threading.Thread(target=drop_and_use_again)
    owner.start()
    try:
        while seen[OK] < ROUNDS or seen[CHANGED] < ROUNDS:
            number = int(words[0])
            args = found.ctypes.data, data.ctypes.data, LARGE_NBYTES, False, words.ctypes.data, number, NO_PIDFD
            status = guarded_copy(*args)
            seen[status] += 1
            if status == OK:  # of this number or, where it has not been filled yet, of the one before: nothing later
                assert set(np.unique(found).tolist()) <= {number % 251, (number - 1) % 251}
    finally:
        stop.set()
        owner.join()
