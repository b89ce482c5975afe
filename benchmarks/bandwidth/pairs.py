"""``--pairs N``: N clients with a server each, all at once, and the bytes that they move together.

Each pair is a process that is the client of a server of its own. The process that started it drives it over a pipe of
`multiprocessing`, and it ends with that process. Every round begins in all pairs at the same moment of the monotonic
clock, which the processes of a host share. Rounds of transfers take turns with rounds of memcpys, also by all pairs at
once. A sample is the bytes of a round over its span, from the begin of the first pair to the end of the last: time that
pairs wait for the slowest is in the figure.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import NoneType
from typing import Any

from skipper.benchmarks.bandwidth import ceiling
from skipper.benchmarks.bandwidth.channel import handle_secret
from skipper.benchmarks.bandwidth.integrity import SEEDS, directions, prove_after, prove_before
from skipper.benchmarks.bandwidth.memory import allocate
from skipper.benchmarks.bandwidth.messages import Alive, Wire, Workload, tell
from skipper.benchmarks.bandwidth.options import Measure
from skipper.benchmarks.bandwidth.rows import first_use_row, pairs_row, wire_row
from skipper.benchmarks.bandwidth.server import reach
from skipper.benchmarks.bandwidth.side import FarSide, Side, configure, patience
from skipper.benchmarks.bandwidth.timing import TimeSpan, Together
from skipper.benchmarks.errors import BenchmarkError, IntegrityError, PeerLostError, PeerTimeoutError
from skipper.benchmarks.parent import follow_parent
from skipper.benchmarks.report import Result
from skipper.benchmarks.statistics import time_runs
from skipper.dataplane.errors import DataplaneError

__all__ = ["run_pairs"]

_ROUND_BYTES = 256 << 20
"""About what a pair moves in one round: enough to take much longer than all pairs need to begin."""

_MOST_RUNS = 2000
_ROUNDS = 20
_LEAD_NS = 3_000_000
_LEAD_OF_A_PAIR_NS = 500_000
_START_S = 60.0
_STOP_S = 10.0
_KNOWN = (BenchmarkError, DataplaneError, OSError, MemoryError, ValueError)


@dataclass(frozen=True, slots=True)
class Setup:
    """What a pair is: its parent's pid, its work, and where its server is; with ``None``, it starts its own."""

    parent: int
    workload: Workload
    net_devices: str | None
    server: tuple[str, int] | None
    token: bytes


@dataclass(frozen=True, slots=True)
class PreparePair:
    """Get ready for a size, with ``warmup`` untimed runs of everything. Answered by ``None``."""

    size: int
    warmup: int


@dataclass(frozen=True, slots=True)
class Prove:
    """Check the data before the timed rounds of a size, or after them. Answered by ``None``."""

    size: int
    seed: int
    after: bool


@dataclass(frozen=True, slots=True)
class Round:
    """From ``begin_ns`` of the monotonic clock on, transfer or copy ``runs`` times. Answered by `TimeSpan`."""

    size: int
    copy: bool
    runs: int
    begin_ns: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The run is over. Not answered."""


@dataclass(frozen=True, slots=True)
class PairReady:
    """The pair has connected: by which backend, what first use cost, and which wire is between the ends."""

    backend: str
    register_us: float
    connect_us: float
    wire: Wire


@dataclass(frozen=True, slots=True)
class PairFailure:
    """Why the pair gave up, and whether it found wrong data."""

    message: str
    wrong_data: bool


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
        token: The secret that both ends prove to each other, and that handles are proved by.
        net_devices: As for `side.configure`.

    Yields:
        The slowest first use, the wire if one is known, and a row for each size.

    Raises:
        IntegrityError: With ``measure.check``: a pair found wrong bytes.
        BenchmarkError: A pair failed, died, or is silent.
    """
    setup = Setup(os.getpid(), workload, net_devices, server, token)
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
    if isinstance(answer, PairFailure):
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
    """Start the processes; they end with the block."""
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


def pair_main(pipe: Connection[Any, Any], setup: Setup) -> None:
    """Be one pair until the parent sends `Stop`, or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent alone answers Ctrl-C
    if not follow_parent(setup.parent, signal.SIGKILL):
        return
    try:
        timeout = setup.workload.timeout_s
        with reach(setup.server, setup.token, net_devices=setup.net_devices, timeout=timeout) as channel:
            _serve(pipe, setup, FarSide(channel, setup.workload))
    except EOFError:
        return
    except _KNOWN as error:
        named = "" if isinstance(error, BenchmarkError) else f"{type(error).__name__}: "
        with contextlib.suppress(OSError):
            pipe.send(PairFailure(f"{named}{error}", isinstance(error, IntegrityError)))


def _serve(pipe: Connection[Any, Any], setup: Setup, far: FarSide) -> None:
    workload = setup.workload
    configure(workload, setup.net_devices, secret=handle_secret(setup.token))
    offer, handles = far.open()
    with contextlib.closing(Side(workload, exposes=False, transfers=True)) as near:
        scratch = allocate(workload.mem, workload.largest * workload.batch)
        connect_us = near.connect(handles)
        wire = ceiling.wire_ceiling(
            near.backend,
            ceiling.link(near.backend, setup.net_devices),
            far.link(near.backend),
            one_host=offer.boot_id == ceiling.boot_id(),
        )
        pipe.send(PairReady(near.backend, offer.register_us, connect_us, wire))
        ways = directions(workload, near, far)
        while not isinstance(request := pipe.recv(), Stop):
            tell(far.channel, Alive())
            match request:
                case PreparePair(size, warmup):
                    for call in (near.mover(size), scratch.copier(near.local, size * workload.batch)):
                        time_runs(call, warmup)
                    pipe.send(None)
                case Prove(size, seed, after):
                    if after:
                        prove_after(ways, size, seed=seed)
                    else:
                        prove_before(ways, size, batch=workload.batch, seed=seed)
                    pipe.send(None)
                case Round(size, copy, runs, begin_ns):
                    call = scratch.copier(near.local, size * workload.batch) if copy else near.mover(size)
                    time.sleep(max(0, begin_ns - time.monotonic_ns()) / 1e9)
                    began_ns = time.monotonic_ns()
                    durations = time_runs(call, runs)
                    pipe.send(TimeSpan(began_ns, time.monotonic_ns(), durations))
        far.goodbye()
