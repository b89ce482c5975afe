"""The protocol between the runner and a peer's process: lines of JSON over its standard input and output.

    peer:    {"ready": true}
    runner:  {"row": "call", "n": 200, "limit_s": 2.0}
    peer:    {"samples": [358211, ...]}     durations in ns, in the order in which they were taken
          or {"cannot": "it has no actors"} the peer does not do that here, and why
          or {"failed": "RuntimeError: ..."}

The process ends when its standard input closes. What its libraries print goes to standard error, also where they print
to standard output.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TextIO, TypeVar

__all__ = ["Block", "CannotError", "MeasuringTurn", "private_stdout", "serve"]

T = TypeVar("T")


class CannotError(Exception):
    """A peer does not do a row's work; the message says why."""


@dataclass(frozen=True, slots=True)
class MeasuringTurn:
    """How much of a row is asked for.

    Attributes:
        n: Samples.
        limit_s: Begin no further sample once this many seconds have passed since the first; there is always one.
    """

    n: int
    limit_s: float

    @property
    def warmup(self) -> int:
        """Runs that are not timed, before those that are."""
        return max(1, self.n // 10)

    def times(self, action: Callable[[], object], *, warmup: int | None = None) -> list[int]:
        """Run ``action`` as often as asked for; durations in ns."""
        for _ in range(self.warmup if warmup is None else warmup):
            action()
        durations: list[int] = []
        begun = perf_counter_ns()
        while self.goes_on(len(durations), begun):
            begin = perf_counter_ns()
            action()
            durations.append(perf_counter_ns() - begin)
        return durations

    def times_spawn(self, spawn: Callable[[], T], stop: Callable[[T], object]) -> list[int]:
        """The same, without warm-up, for something that must be stopped; all are stopped after the last sample."""
        spawned: list[T] = []
        durations = self.times(lambda: spawned.append(spawn()), warmup=0)
        for each in spawned:
            stop(each)
        return durations

    async def times_async(self, action: Callable[[], Awaitable[object]], *, warmup: int | None = None) -> list[int]:
        """The same for a coroutine function."""
        for _ in range(self.warmup if warmup is None else warmup):
            await action()
        durations: list[int] = []
        begun = perf_counter_ns()
        while self.goes_on(len(durations), begun):
            begin = perf_counter_ns()
            await action()
            durations.append(perf_counter_ns() - begin)
        return durations

    def goes_on(self, done: int, begun_ns: int) -> bool:
        """Whether another sample is wanted after ``done``, the first of which began at ``begun_ns``."""
        return done < 1 or (done < self.n and perf_counter_ns() - begun_ns < self.limit_s * 1e9)


Block = Callable[[MeasuringTurn], list[int]]
"""Does a row's work in one turn, and says how long each time took, in ns."""


def private_stdout() -> TextIO:
    """Keep standard output for answers: from now on, what libraries write to it goes to standard error."""
    sys.stdout.flush()
    kept = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return kept


def serve(blocks: Mapping[str, Block], cannot: Mapping[str, str], answers: TextIO) -> None:
    """Answer requests until standard input ends.

    Args:
        blocks: How each row is done.
        cannot: Why the others are not.
        answers: Where answers go.
    """
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(_answer(request, blocks, cannot)), file=answers, flush=True)


def _answer(
    request: Mapping[str, object], blocks: Mapping[str, Block], cannot: Mapping[str, str]
) -> dict[str, str | list[int]]:
    name = str(request["row"])
    if name not in blocks:
        return {"cannot": cannot.get(name, "it has no such thing")}
    turn = MeasuringTurn(int(str(request["n"])), float(str(request["limit_s"])))
    try:
        return {"samples": blocks[name](turn)}
    except CannotError as reason:
        return {"cannot": str(reason)}
    except Exception as error:  # noqa: BLE001 - any error of a foreign library is the row's result
        lines = str(error).strip().splitlines()
        return {"failed": f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]}
