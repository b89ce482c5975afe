"""Ray: actors, and objects in its shared-memory store."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from time import perf_counter_ns
from typing import Any

import numpy as np
import ray

from skipper.benchmarks.peers import state
from skipper.benchmarks.peers.memory import Bytes, Operation, memory_blocks
from skipper.benchmarks.peers.protocol import Block, CannotError, MeasuringTurn
from skipper.benchmarks.peers.work import FANOUT, MESSAGE_NBYTES, PIPELINED, REGION_NBYTES, Family, Span

__all__ = ["CANNOT", "open_blocks"]

CANNOT: dict[str, str] = {}

_MESSAGE = bytes(MESSAGE_NBYTES)
_STORE_NBYTES = 3 << 30  # two generations of the largest row, and what an earlier row has not yet released
_remote: Any = ray.remote


def open_blocks(family: Family, stack: ExitStack) -> dict[str, Block]:
    """See `benchmarks.peers.child`."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        num_cpus=16,  # actors request no CPU; the number of cores must not limit what is measured
        include_dashboard=False,
        object_store_memory=_STORE_NBYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=tempfile.gettempdir(),
    )
    stack.callback(ray.shutdown)
    if family == "memory":
        return memory_blocks(_Region())
    return _actor_blocks() if family == "actors" else _store_blocks()


class Echo:
    """Answers at once."""

    def echo(self, value: bytes) -> bytes:
        """Return the argument."""
        return value

    def time_calls(self, other: Any, turn: MeasuringTurn) -> list[int]:
        """Call another actor from here."""
        return turn.times(lambda: ray.get(other.echo.remote(_MESSAGE)))


def _spawn() -> list[Any]:
    actors = [_remote(Echo).options(num_cpus=0).remote() for _ in range(FANOUT)]
    ray.get([actor.echo.remote(_MESSAGE) for actor in actors])
    return actors


def _actor_blocks() -> dict[str, Block]:
    actors = _spawn()
    one, two = actors[:2]

    def pipeline() -> None:
        ray.get([one.echo.remote(_MESSAGE) for _ in range(PIPELINED)])

    def stop(spawned: list[Any]) -> None:
        for actor in spawned:
            ray.kill(actor)

    return {
        "call": lambda turn: turn.times(lambda: ray.get(one.echo.remote(_MESSAGE))),
        "actor_to_actor": lambda turn: list(ray.get(two.time_calls.remote(one, turn))),
        "fanout": lambda turn: turn.times(lambda: ray.get([actor.echo.remote(_MESSAGE) for actor in actors])),
        "pipelined": lambda turn: turn.times(pipeline),
        "spawn": lambda turn: turn.times_spawn(_spawn, stop),
    }


class Owner:
    """Owns objects."""

    def put(self, spans: Sequence[Span], value: int) -> list[Any]:
        """An object for each span, all of one byte."""
        return [ray.put(np.full(nbytes, value, np.uint8)) for _, nbytes in spans]


class _Region:
    """Objects that another process has put; they do not change, so filling makes new ones."""

    def __init__(self) -> None:
        self.local: Bytes = np.zeros(REGION_NBYTES, np.uint8)
        self._owner = _remote(Owner).options(num_cpus=0).remote()
        self._objects: list[Any] = []

    def operation(self, spans: Sequence[Span], *, write: bool) -> Operation:
        """Get them, which maps them, and copy out."""
        if write:
            raise CannotError("objects of Ray do not change: nothing writes into the memory of another process")

        def read() -> None:
            for (offset, nbytes), value in zip(spans, ray.get(self._objects), strict=True):
                self.local[offset : offset + nbytes] = value

        return read

    def fill(self, spans: Sequence[Span], value: int) -> None:
        """See `Far`."""
        self._objects.clear()
        self._objects += ray.get(self._owner.put.remote(spans, value))

    def holds(self, spans: Sequence[Span], value: int) -> bool:
        """See `Far`."""
        raise CannotError("it is never written")


class Holder:
    """Puts or gets, and takes the time."""

    def __init__(self) -> None:
        self._state = state.state_dict()
        self._large = state.large().numpy()
        self._small = state.small().numpy()
        self._batch = [tensor.numpy() for tensor in state.batch().values()]
        self._kept: list[Any] = []

    def _arrays(self) -> dict[str, Any]:
        return {name: tensor.numpy() for name, tensor in self._state.items()}

    def time_puts(self, row: str, turn: MeasuringTurn) -> list[int]:
        """Puts of one row; each put drops the object of the put before it."""
        values = {"put_64B": self._small, "put_512MiB": self._large, "put_state_dict": self._arrays()}

        def put() -> None:
            self._kept = [*map(ray.put, self._batch)] if row == "put_batch" else [ray.put(values[row])]

        return turn.times(put, warmup=state.WARMUP)

    def put(self, row: str, count: int) -> list[Any]:
        """Objects for the other to get."""
        if row == "get_batch":
            self._kept = [*map(ray.put, self._batch)]
            return self._kept
        value = {"get_64B": self._small, "get_512MiB": self._large, "get_state_dict": self._arrays()}[row]
        self._kept = [ray.put(value) for _ in range(count)]
        return self._kept

    def time_gets(self, row: str, objects: list[Any], turn: MeasuringTurn) -> list[int]:
        """Gets of one row: each get of a small object takes another object, since Ray caches small ones."""
        left = iter(objects)

        def get() -> None:
            if row == "get_batch":
                for array, found in zip(self._batch, ray.get(objects), strict=True):
                    array[:] = found
                return
            value = ray.get(next(left, objects[0]))
            if row == "get_512MiB":
                self._large[:] = value
            elif row == "get_state_dict":
                self._take(value)

        return turn.times(get, warmup=1)

    def _take(self, arrays: dict[str, Any]) -> None:
        for name, tensor in self._state.items():
            tensor.numpy()[:] = arrays[name]

    def prepare(self, number: int) -> None:
        """The optimizer's step."""
        for tensor in self._state.values():
            tensor.fill_(number)

    def publish(self) -> tuple[int, list[Any]]:
        """Put the state dict; returns the time when that began, and the object, in a list so that it is not fetched."""
        begin = perf_counter_ns()
        self._kept = [ray.put(self._arrays())]
        return begin, self._kept

    def pull(self, objects: list[Any]) -> int:
        """Get it, in place; returns the time when all had arrived."""
        self._take(ray.get(objects[0]))
        return perf_counter_ns()

    def check(self, number: int) -> None:
        """Check that every element is ``number``."""
        state.check(self._state, number)


def _store_blocks() -> dict[str, Block]:
    writer, reader = (_remote(Holder).options(num_cpus=0).remote() for _ in range(2))
    published: list[Any] = []

    def puts(row: str) -> Block:
        return lambda turn: list(ray.get(writer.time_puts.remote(row, turn)))

    def gets(row: str) -> Block:
        def block(turn: MeasuringTurn) -> list[int]:
            objects = ray.get(writer.put.remote(row, turn.n + 1 if row == "get_64B" else 1))
            return list(ray.get(reader.time_gets.remote(row, objects, turn)))

        return block

    def publish() -> int:
        begin, published[:] = ray.get(writer.publish.remote())
        return int(begin)

    return {
        **{row: puts(row) for row in ("put_64B", "put_512MiB", "put_state_dict", "put_batch")},
        **{row: gets(row) for row in ("get_64B", "get_512MiB", "get_state_dict", "get_batch")},
        "sync": state.syncing(
            lambda number: ray.get(writer.prepare.remote(number)),
            publish,
            lambda: int(ray.get(reader.pull.remote(published))),
            lambda number: ray.get(reader.check.remote(number)),
        ),
    }
