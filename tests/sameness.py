"""Whether bytes are those that are wanted, told in a line.

A bare `assert found == wanted` of a few megabytes is harmless until it fails: then pytest lays out both sides and looks
for the smallest difference between them, which takes longer than any test may.
"""

from typing import Any

import numpy as np

Bytes = bytes | bytearray | memoryview | np.ndarray[Any, Any]

_SHOWN = 8


def assert_same(found: Bytes, wanted: Bytes, what: str = "bytes") -> None:
    """Fail unless both are the same bytes, with the place where they differ first and nothing of the rest.

    Raises:
        AssertionError: They are not.
    """
    __tracebackhide__ = True
    here, there = (np.frombuffer(side, np.uint8) for side in (found, wanted))
    if here.nbytes != there.nbytes:
        raise AssertionError(f"{here.nbytes} {what}, not {there.nbytes}")
    wrong = np.flatnonzero(here != there)
    if len(wrong):
        first, last = int(wrong[0]), int(wrong[-1])
        shown = slice(first, first + _SHOWN)
        raise AssertionError(
            f"{len(wrong)} of {here.nbytes} {what} are wrong, from {first} to {last}: "
            f"{here[shown].tobytes().hex(' ')} where {there[shown].tobytes().hex(' ')} should be"
        )
