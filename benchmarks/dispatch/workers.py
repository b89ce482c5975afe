"""Functions that the script has the workers run, by name and in order with the other instructions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any

import torch

from skipper.control.runtime.current_runtime import current

__all__ = ["eager", "heard_from_elsewhere", "hold", "mark", "marked"]

_KEPT = "skipper.benchmarks.dispatch"


def hold(worker: Any, call: Any, inputs: Sequence[Any], constant: float) -> None:
    """Do nothing for a while, so that everything to be timed has arrived before it begins."""
    time.sleep(constant)
    worker.own[_KEPT] = []


def mark(worker: Any, call: Any, inputs: Sequence[Any], constant: None) -> None:
    """Note the time."""
    worker.own[_KEPT].append(perf_counter_ns())


def marked(worker: Any, value: object, argument: None) -> int:
    """Nanoseconds between the two marks."""
    begin, end = worker.own.pop(_KEPT)
    return int(end - begin)


def heard_from_elsewhere(worker: Any, value: object, argument: None) -> int:
    """How many messages have come to this process from those of other hosts."""
    return current().transport.heard_from_elsewhere()


def eager(worker: Any, value: torch.Tensor, count: int) -> int:
    """Nanoseconds for adding a tensor to itself ``count`` times, in a plain loop of this process."""
    with torch.no_grad():
        begin = perf_counter_ns()
        for _ in range(count):
            torch.add(value, value)
        return perf_counter_ns() - begin
