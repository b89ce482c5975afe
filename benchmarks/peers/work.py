"""The work that every peer is asked to do: rows with their names, sizes, units and yardsticks.

A sample is the duration in ns of one piece of the row's work; `Row.figure` converts it to the row's unit. This module
imports the standard library only, since the process of every peer imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "BATCHES",
    "BATCH_COUNT",
    "BATCH_NBYTES",
    "FAMILIES",
    "FANOUT",
    "LARGE_NBYTES",
    "MESSAGE_NBYTES",
    "PIPELINED",
    "REGION_NBYTES",
    "ROWS",
    "SIZES",
    "SMALL_NBYTES",
    "STATE_SHAPES",
    "Family",
    "Row",
    "Span",
    "Unit",
    "one_sided",
    "rows_of",
]

Family = Literal["actors", "memory", "store", "engine"]
Unit = Literal["us", "s", "1/s", "GB/s"]
Span = tuple[int, int]
"""Offset and length in bytes within a region."""

FAMILIES: tuple[Family, ...] = ("actors", "memory", "store", "engine")

MESSAGE_NBYTES = 100
"""Bytes of the message that every call carries there and back."""

PIPELINED = 1000
"""Calls that do not wait for each other."""

FANOUT = 4
"""Actors that are called at once, each in a process of its own; and processes of the spawn."""

REGION_NBYTES = 512 << 20
"""Size of the memory at each end of the one-sided transfers."""

SIZES = {"64B": 64, "4KiB": 4 << 10, "64KiB": 64 << 10, "1MiB": 1 << 20, "64MiB": 64 << 20, "512MiB": REGION_NBYTES}

BATCHES: dict[str, tuple[Span, ...]] = {}
"""Many buffers, moved by one request where a peer has such requests: by the name of the row."""

SMALL_NBYTES, LARGE_NBYTES = 64, 512 << 20

STATE_SHAPES: tuple[tuple[int, int], ...] = ((384, 1024), (128, 1024), (512, 1024), (256, 1024)) * 50
"""Shapes of a state dict of 200 tensors, 250 MiB in float32."""

BATCH_COUNT, BATCH_NBYTES = 4000, 16 << 10
"""Tensors that are put and read together, each under a key of its own; and the bytes of one."""

_STATE_NBYTES = sum(rows * columns * 4 for rows, columns in STATE_SHAPES)

_BATCH_NBYTES = BATCH_COUNT * BATCH_NBYTES


def _consecutive(sizes: list[int]) -> tuple[Span, ...]:
    spans, offset = [], 0
    for nbytes in sizes:
        spans.append((offset, nbytes))
        offset += nbytes
    return tuple(spans)


BATCHES["read_64x1MiB"] = _consecutive([1 << 20] * 64)
BATCHES["read_320"] = _consecutive([4 << 10, 128 << 10, 640 << 10, 3 << 20] * 80)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        name: What it is called in requests and reports.
        family: Which rows a peer's process can be asked for at once.
        title: For people.
        unit: Unit of the figure. For ``us`` and ``s``, lower is better; for rates, higher.
        yardstick: Name of the peer that it is compared with: what the machine or the wire can do.
        n: Samples in a round.
        amount: Calls or bytes in a sample, for rates.
    """

    name: str
    family: Family
    title: str
    unit: Unit
    yardstick: str
    n: int
    amount: int = 1

    @property
    def is_rate(self) -> bool:
        """Whether more is better."""
        return self.unit in ("1/s", "GB/s")

    def figure(self, duration_ns: float) -> float:
        """A sample in the row's unit."""
        if self.unit == "us":
            return duration_ns / 1e3
        if self.unit == "s":
            return duration_ns / 1e9
        if self.unit == "1/s":
            return self.amount * 1e9 / duration_ns
        return self.amount / duration_ns  # bytes per ns are GB/s


def one_sided(name: str) -> tuple[bool, tuple[Span, ...]]:
    """Whether a row of the memory family writes, and what it moves."""
    if name in BATCHES:
        return False, BATCHES[name]
    verb, _, size = name.partition("_")
    return verb == "write", ((0, SIZES[size]),)


def rows_of(family: Family) -> tuple[Row, ...]:
    """The rows of a family, in the order in which they are measured."""
    return tuple(row for row in ROWS if row.family == family)


def _transfers() -> list[Row]:
    rows = []
    for verb in ("read", "write"):
        for size, nbytes in SIZES.items():
            small = nbytes <= 64 << 10
            n = 200 if small else 50 if nbytes <= 1 << 20 else 5 if nbytes < REGION_NBYTES else 3
            unit: Unit = "us" if small else "GB/s"
            rows.append(Row(f"{verb}_{size}", "memory", f"one-sided {verb}, {size}", unit, "memcpy", n, nbytes))
    titles = {"read_64x1MiB": "64 buffers of 1 MiB", "read_320": "320 buffers of 4 KiB to 3 MiB"}
    for name, spans in BATCHES.items():
        nbytes = sum(length for _, length in spans)
        rows.append(Row(name, "memory", f"one read of {titles[name]}", "GB/s", "memcpy", 5, nbytes))
    return rows


ROWS: tuple[Row, ...] = (
    Row("call", "actors", "call of an actor, to the answer", "us", "grpc", 500),
    Row("actor_to_actor", "actors", "the same from within an actor", "us", "grpc", 500),
    Row("fanout", "actors", "call of 4 actors, to the last answer", "us", "grpc", 60),
    Row("pipelined", "actors", "calls of which none waits for another", "1/s", "grpc", 3, PIPELINED),
    Row("spawn", "actors", "4 processes, to the first answer of all", "s", "sockets", 1),
    *_transfers(),
    Row("put_64B", "store", "put of a tensor of 64 B", "us", "grpc", 60),
    Row("get_64B", "store", "get of a tensor of 64 B", "us", "grpc", 60),
    Row("put_512MiB", "store", "put of 512 MiB over an older value", "GB/s", "memcpy", 3, LARGE_NBYTES),
    Row("get_512MiB", "store", "get of 512 MiB in place", "GB/s", "memcpy", 3, LARGE_NBYTES),
    Row("put_state_dict", "store", "put of 200 tensors, 250 MiB", "GB/s", "memcpy", 3, _STATE_NBYTES),
    Row("get_state_dict", "store", "get of them in place", "GB/s", "memcpy", 3, _STATE_NBYTES),
    Row("put_batch", "store", "put of 4,000 tensors of 16 KiB, each a key", "GB/s", "memcpy", 3, _BATCH_NBYTES),
    Row("get_batch", "store", "get of them in place", "GB/s", "memcpy", 3, _BATCH_NBYTES),
    Row("sync", "store", "put and get of them, the quickest way that the peer has", "GB/s", "memcpy", 3, _STATE_NBYTES),
    Row("issue", "engine", "an operation on a remote tensor, to its return", "us", "grpc", 500),
    Row("fetch_4x4", "engine", "fetch of a 4x4 tensor", "us", "grpc", 60),
    Row("fetch_64MiB", "engine", "fetch of 64 MiB", "GB/s", "memcpy", 3, 64 << 20),
)
