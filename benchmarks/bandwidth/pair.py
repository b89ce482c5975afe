"""One pair of ``--pairs``: a process that is the client of a server of its own, and does what `pairs` asks of it.

It is driven over a pipe of `multiprocessing` by the process that started it, and ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from skipper.benchmarks.bandwidth import ceiling
from skipper.benchmarks.bandwidth.channel import MessageChannel, connect, handle_secret
from skipper.benchmarks.bandwidth.far_side import FarSide
from skipper.benchmarks.bandwidth.integrity import directions, prove_after, prove_before
from skipper.benchmarks.bandwidth.memory import allocate
from skipper.benchmarks.bandwidth.messages import Alive, Wire, Workload, tell
from skipper.benchmarks.bandwidth.server import local_server
from skipper.benchmarks.bandwidth.side import Side, configure
from skipper.benchmarks.bandwidth.wire import ceiling as wire_ceiling
from skipper.benchmarks.bandwidth.wire import link
from skipper.benchmarks.errors import BenchmarkError, IntegrityError
from skipper.dataplane.errors import DataplaneError

__all__ = ["Failure", "PreparePair", "Prove", "PairReady", "Round", "Setup", "TimeSpan", "Stop", "pair_main"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_KNOWN = (BenchmarkError, DataplaneError, OSError, MemoryError, ValueError)


@dataclass(frozen=True, slots=True)
class Setup:
    """What a pair is: its parent's pid, what it does, and how it gets its server; no host means one of its own."""

    parent: int
    workload: Workload
    net_devices: str | None
    host: str | None
    port: int
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
    """The end. Not answered."""


@dataclass(frozen=True, slots=True)
class PairReady:
    """The pair has connected: by which backend, what first use cost, and which wire is between the ends."""

    backend: str
    register_us: float
    connect_us: float
    wire: Wire


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """When a round really began and ended, and how long each of its runs took."""

    begin_ns: int
    end_ns: int
    durations_ns: list[int]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the pair gave up, and whether it found wrong data."""

    message: str
    wrong_data: bool


def pair_main(pipe: Connection[Any, Any], setup: Setup) -> None:
    """Be one pair until told to stop, or until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent alone answers Ctrl-C
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != setup.parent:  # it died before the line above could tie this process to it
        return
    try:
        with _server(setup) as channel:
            _serve(pipe, setup, FarSide(channel, setup.workload))
    except EOFError:
        return
    except _KNOWN as error:
        named = "" if isinstance(error, BenchmarkError) else f"{type(error).__name__}: "
        with contextlib.suppress(OSError):
            pipe.send(Failure(f"{named}{error}", isinstance(error, IntegrityError)))


@contextlib.contextmanager
def _server(setup: Setup) -> Iterator[MessageChannel]:
    timeout = setup.workload.timeout_s
    if setup.host is None:
        with local_server(setup.token, net_devices=setup.net_devices, timeout=timeout) as channel:
            yield channel
    else:
        with connect(setup.host, setup.port, setup.token, timeout=timeout) as channel:
            yield channel


def _serve(pipe: Connection[Any, Any], setup: Setup, far: FarSide) -> None:
    workload = setup.workload
    configure(workload, setup.net_devices, secret=handle_secret(setup.token))
    offer, handles = far.open()
    with closing(Side(workload, exposes=False, transfers=True)) as near:
        scratch = allocate(workload.mem, workload.largest * workload.batch)
        connect_us = near.connect(handles)
        wire = wire_ceiling(
            near.backend,
            link(near.backend, setup.net_devices),
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
                        _timed(call, warmup)
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
                    durations = _timed(call, runs)
                    pipe.send(TimeSpan(began_ns, time.monotonic_ns(), durations))
        far.goodbye()


def _timed(call: Callable[[], object], runs: int) -> list[int]:
    durations = []
    for _ in range(runs):
        begin_ns = time.perf_counter_ns()
        call()
        durations.append(time.perf_counter_ns() - begin_ns)
    return durations
