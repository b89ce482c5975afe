"""`Latencies`: how long each endpoint of an actor took lately."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from skipper.control.model.endpoint_spec import WRAPPED

KEPT_CALLS = 512
"""Calls kept per endpoint: enough for a 99th percentile that is not the maximum."""

KEPT_ENDPOINTS = 64


@dataclass(frozen=True, slots=True)
class EndpointLatency:
    """How long the latest calls of one endpoint took to handle, without their time in the queue.

    The example of `JobStatus` shows one.

    Attributes:
        endpoint: its name.
        calls: how many calls that is, `KEPT_CALLS` at most.
        p50_s: nearest-rank percentile.
        p99_s: likewise.
        max_s: the longest of them.
    """

    endpoint: str
    calls: int
    p50_s: float
    p99_s: float
    max_s: float


class Latencies:
    """The latest durations by endpoint. The actor's own thread writes them, any reads them."""

    __slots__ = ("_recent",)

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {}

    def took(self, method: str, seconds: float) -> None:
        """Note a call that has been handled, whatever its outcome."""
        recent = self._recent.get(method)
        if recent is None:
            recent = self._begin(method)
        recent.append(seconds)

    def summary(self) -> list[EndpointLatency]:
        """Each endpoint that was called, by name."""
        return [
            _summary(method, _copied(recent))
            for method, recent in sorted(self._recent.copy().items())
            if recent and not method.endswith(WRAPPED)
        ]

    def _begin(self, method: str) -> deque[float]:
        """The durations of a method that is called for the first time; beyond the limit they are not kept."""
        name = method.removesuffix(WRAPPED)
        recent = self._recent.get(name)
        if recent is None:
            recent = deque(maxlen=KEPT_CALLS)
            if len(self._recent) >= 2 * KEPT_ENDPOINTS:
                return recent
        self._recent[name] = self._recent[method] = recent
        return recent


def _copied(recent: deque[float]) -> list[float]:
    while True:
        try:
            return list(recent)
        except RuntimeError:  # it has changed during the copy
            continue


def _summary(endpoint: str, seconds: Sequence[float]) -> EndpointLatency:
    ordered = sorted(seconds)
    p50, p99 = (ordered[math.ceil(part * len(ordered)) - 1] for part in (0.5, 0.99))
    return EndpointLatency(endpoint, len(ordered), p50, p99, ordered[-1])
