"""What the transfers are held against: a plain copy of as many bytes in the same run."""

from __future__ import annotations

import statistics
from time import perf_counter

import numpy as np

from skipper import dataplane

REPEATS = 21


def time_memcpy(nbytes: int) -> float:
    """Median seconds that one thread takes to copy ``nbytes`` from one warm buffer to another."""
    source = np.ones(nbytes, dtype=np.uint8)
    target = np.zeros(nbytes, dtype=np.uint8)
    samples = []
    for _ in range(REPEATS):
        begin = perf_counter()
        dataplane.memcpy(target, source)
        samples.append(perf_counter() - begin)
    return statistics.median(samples[1:])
