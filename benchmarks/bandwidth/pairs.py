"""``--pairs N``: so many servers and clients at once, and what they move together.

Every round begins in all pairs at the same moment of the clock that processes of a host share. Rounds of transfers
and rounds of memcpys, by all pairs at once too, take turns. A sample is the bytes of a round over its span, from the
first pair's begin to the last one's end: what waits for the slowest pair waits in the figure.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from types import NoneType
from typing import Any

from skipper.benchmarks.bandwidth.far_side import patience
from skipper.benchmarks.bandwidth.integrity import SEEDS
from skipper.benchmarks.bandwidth.messages import Workload
from skipper.benchmarks.bandwidth.options import Measure
from skipper.benchmarks.bandwidth.pair import (
    Failure,
    PairReady,
    PreparePair,
    Prove,
    Round,
    Setup,
    Stop,
    TimeSpan,
    pair_main,
)
from skipper.benchmarks.bandwidth.rows import first_use_row, pairs_row, wire_row
from skipper.benchmarks.bandwidth.together import Together
from skipper.benchmarks.errors import BenchmarkError, IntegrityError, PeerLostError, PeerTimeoutError
from skipper.benchmarks.report import Result

__all__ = ["run_pairs"]

_ROUND_BYTES = 256 << 20
"""About what a pair moves in one round: long beside the moment in which all begin."""

_MOST_RUNS = 2000
_ROUNDS = 20
_LEAD_NS = 3_000_000
_LEAD_OF_A_PAIR_NS = 500_000
_START_S = 60.0
_STOP_S = 10.0


def run_pairs(
    workload: Workload,
    sizes: Sequence[int],
    *,
    pairs: int,
    measure: Measure,
    server: tuple[str, int] | None,
    token: bytes,
    net_devices: str | None,
) -> Iterator[Result]:
    """Measure every size with all pairs at once.

    Args:
        workload: What each pair does.
        sizes: Bytes of a buffer, one after another.
        pairs: How many.
        measure: How often, and whether to check.
        server: Where the servers are reached; ``None`` starts one here for each pair.
        token: What the server wants to see proved, and what handles are proved by.
        net_devices: As for `side.configure`.

    Yields:
        The slowest first use, the wire if one is known, and a row for each size.

    Raises:
        IntegrityError: With ``measure.check``: a pair found wrong bytes.
        BenchmarkError: A pair failed, died, or is silent.
    """
    host, port = server or (None, 0)
    setup = Setup(os.getpid(), workload, net_devices, host, port, token)
    with _pairs(setup, pairs) as pipes:
        ready = [_answer(pipe, PairReady, timeout=_START_S + pairs) for pipe in pipes]
        slowest = max(ready, key=lambda one: one.register_us + one.connect_us)
        wire = slowest.wire
        yield first_use_row(
            workload, backend=slowest.backend, register_us=slowest.register_us, connect_us=slowest.connect_us
        )
        if wire.gbit_per_s is not None:
            yield wire_row(wire, workload)
        for index, size in enumerate(sizes):
            seed = SEEDS * index
            moved, copied = _measure(pipes, workload, size, measure, seed)
            yield pairs_row(
                moved, copied, workload, size=size, backend=slowest.backend, wire=wire, verified=measure.check
            )
        for pipe in pipes:
            pipe.send(Stop())


def _measure(
    pipes: Sequence[Connection[Any, Any]], workload: Workload, size: int, measure: Measure, seed: int
) -> tuple[Together, Together]:
    limit = patience(workload) * 4
    if measure.check:
        _all(pipes, Prove(size, seed, after=False), timeout=limit)
    nbytes = size * workload.batch
    runs = max(1, min(_MOST_RUNS, _ROUND_BYTES // nbytes))
    rounds: int | None = _ROUNDS if measure.duration_s is None else None
    if measure.iterations is not None:
        runs = max(1, min(runs, measure.iterations // _ROUNDS))
        rounds = max(1, measure.iterations // runs)
    _all(pipes, PreparePair(size, runs if measure.warmup is None else measure.warmup), timeout=limit)
    moved, copied = Together(nbytes), Together(nbytes)
    end = math.inf if measure.duration_s is None else time.monotonic() + measure.duration_s
    done = 0
    while rounds is None or done < rounds:
        turns = [(moved, False), (copied, True)]
        for into, copy in turns if done % 2 == 0 else reversed(turns):
            begin_ns = time.monotonic_ns() + _LEAD_NS + _LEAD_OF_A_PAIR_NS * len(pipes)
            into.add(_all(pipes, Round(size, copy, runs, begin_ns), timeout=limit * runs, kind=TimeSpan))
        done += 1
        if time.monotonic() >= end:
            break
    if measure.check:
        _all(pipes, Prove(size, seed, after=True), timeout=limit)
    return moved, copied


def _all(pipes: Sequence[Connection[Any, Any]], request: Any, *, timeout: float, kind: type = NoneType) -> list[Any]:
    """Ask every pair, then wait for all."""
    for pipe in pipes:
        with _lost():
            pipe.send(request)
    return [_answer(pipe, kind, timeout=timeout) for pipe in pipes]


def _answer(pipe: Connection[Any, Any], kind: type, *, timeout: float) -> Any:
    with _lost():
        if not pipe.poll(timeout):
            raise PeerTimeoutError(f"a pair said nothing for {timeout:.3g} s")
        answer = pipe.recv()
    if isinstance(answer, Failure):
        raise (IntegrityError if answer.wrong_data else BenchmarkError)(answer.message)
    if not isinstance(answer, kind):
        raise TypeError(f"a pair answers with {answer!r}")
    return answer


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        raise PeerLostError("the process of a pair ended") from error


@contextlib.contextmanager
def _pairs(setup: Setup, count: int) -> Iterator[list[Connection[Any, Any]]]:
    """Start the processes, and see to their end."""
    spawn = multiprocessing.get_context("spawn")
    pipes: list[Connection[Any, Any]] = []
    processes = []
    try:
        for _ in range(count):
            ours, theirs = spawn.Pipe()
            pipes.append(ours)
            process = spawn.Process(target=pair_main, args=(theirs, setup))
            process.start()
            theirs.close()
            processes.append(process)
        yield pipes
        for process in processes:
            process.join(_STOP_S)
    finally:
        for process in processes:
            process.kill()  # no effect on one that has ended
            process.join()
        for pipe in pipes:
            pipe.close()
