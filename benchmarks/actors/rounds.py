"""What is measured, in turns: control, raw gRPC and memcpy, a block of each in every round."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np

from skipper import control
from skipper.benchmarks.actors.parties import AsyncCaller, AsyncEcho, CallingActor, Echo
from skipper.benchmarks.actors.raw_grpc import RawGrpc
from skipper.benchmarks.actors.rpc import RpcEcho
from skipper.benchmarks.errors import BenchmarkError
from skipper.benchmarks.machine import memcpy
from skipper.benchmarks.statistics import Contestant, Schedule, WholeRounds, interleave, time_runs, timed
from skipper.control import ActorMesh
from skipper.control.services import Service

__all__ = ["PIPELINED", "REPLICAS", "ActorsPlan", "Times", "measure"]

REPLICAS = 1
"""Replicas of the service. With several of them the processes would take turns, which `call_one` does not."""

PIPELINED = 1000
"""Calls that do not wait for each other."""

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ActorsPlan:
    """How much is measured.

    Attributes:
        rounds: Blocks of each kind.
        calls: Single calls in a block.
        broadcasts: Messages to each actor in a block.
        spawns: How often the processes are started again.
        warmup: Rounds that are not counted.
        procs: Processes, with an actor each; two or more.
        message_nbytes: Size of the message that every call sends and returns, through actors and through raw gRPC.
        bulk_nbytes: Size of the large argument.
    """

    rounds: int = 24
    calls: int = 150
    broadcasts: int = 2500
    spawns: int = 5
    warmup: int = 2
    procs: int = 4
    message_nbytes: int = 100
    bulk_nbytes: int = 64 << 20


Times = dict[str, list[int]]
"""Durations in ns by what took them."""


def measure(plan: ActorsPlan, times: Times, on_round: Callable[[int], None] | None = None) -> None:
    """Run the plan, and leave no process behind.

    Args:
        plan: How much is measured.
        times: Gets what was measured, the figures of a round once it is whole.
        on_round: Called with the number of rounds after each.

    Raises:
        BenchmarkError: A message was lost, or a reference process ended.
        ControlError: A call failed.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(control.shutdown)
        raw = stack.enter_context(RawGrpc.start())
        rpc = stack.enter_context(RpcEcho.start(timeout=TIMEOUT_S))
        times["spawn"] = []
        for _ in range(plan.spawns):
            times["spawn"].append(_time_spawn(plan.procs))
        rounds = WholeRounds(times, on_round)
        work = _Work(plan, raw, rpc, rounds)
        contestants = [Contestant(name, functools.partial(work.run, name)) for name in work.blocks]
        interleave(contestants, Schedule(plan.rounds, warmup=plan.warmup), after_round=rounds.end_round)


def _time_spawn(count: int) -> int:
    begin = perf_counter_ns()
    procs = control.this_host().spawn_procs({"procs": count})
    procs.spawn("echo", Echo).noted.call().get(TIMEOUT_S)
    elapsed = perf_counter_ns() - begin
    procs.stop().get(TIMEOUT_S)
    return elapsed


class _Work:
    """The actors of the run, and one function for each kind of block."""

    def __init__(self, plan: ActorsPlan, raw: RawGrpc, rpc: RpcEcho, rounds: WholeRounds[int]) -> None:
        self._plan = plan
        self._rounds = rounds
        procs = control.this_host().spawn_procs({"procs": plan.procs})
        self._all: ActorMesh[Echo] = procs.spawn("echo", Echo)
        self._one = self._all.slice(procs=0)
        self._async_one = procs.slice(procs=0).spawn("async_echo", AsyncEcho)
        self._caller = procs.slice(procs=1).spawn("caller", CallingActor)
        self._async_caller = procs.slice(procs=1).spawn("async_caller", AsyncCaller)
        self._service: Service[Echo] = Echo.options(num_replicas=REPLICAS).as_service(name="service")
        self._service.initialized.get(TIMEOUT_S)
        self._message = bytes(plan.message_nbytes)
        self._bulk = bytes(bytearray(b"x") * plan.bulk_nbytes)
        self._target, self._source = (
            np.frombuffer(memory, np.uint8) for memory in (bytearray(plan.bulk_nbytes), self._bulk)
        )
        copy = functools.partial(memcpy(), self._target.ctypes.data, self._source.ctypes.data, plan.bulk_nbytes)
        self.blocks: dict[str, Callable[[], list[int]]] = {
            "grpc_unary": lambda: raw.unary(plan.calls, plan.message_nbytes),
            "call_one": lambda: self._each(lambda: self._one.echo.call_one(self._message)),
            "service_route": lambda: self._each(lambda: self._service.echo.route(self._message)),
            "rpc_call": lambda: rpc.call(plan.calls, self._message),
            "rpc_future": lambda: rpc.call_by_future(plan.calls, self._message),
            "actor_to_actor": self._from_actor,
            "async_actor_to_actor": self._from_async_actor,
            "fanout": lambda: self._each(lambda: self._all.echo.call(self._message)),
            "grpc_stream": lambda: raw.stream(PIPELINED, plan.message_nbytes),
            "pipelined": self._pipeline,
            "broadcast": self._broadcast,
            "bulk": self._send_bulk,
            "memcpy": lambda: time_runs(copy, 3),
        }

    def run(self, name: str) -> None:
        """Run one block."""
        self._rounds.note(name, self.blocks[name]())

    def _each(self, call: Callable[[], control.Future[Any]]) -> list[int]:
        return time_runs(lambda: call().get(TIMEOUT_S), self._plan.calls)

    def _from_actor(self) -> list[int]:
        future: control.Future[list[int]] = self._caller.time_calls.call_one(
            self._one, self._plan.calls, self._message, TIMEOUT_S
        )
        return future.get(TIMEOUT_S)

    def _from_async_actor(self) -> list[int]:
        future: control.Future[list[int]] = self._async_caller.time_calls.call_one(
            self._async_one, self._plan.calls, self._message
        )
        return future.get(TIMEOUT_S)

    def _pipeline(self) -> list[int]:
        def calls() -> None:
            for future in [self._one.echo.call_one(self._message) for _ in range(PIPELINED)]:
                future.get(TIMEOUT_S)

        return [timed(calls)]

    def _broadcast(self) -> list[int]:
        begin = perf_counter_ns()
        for number in range(self._plan.broadcasts):
            self._all.note.broadcast(number)
        noted = sum(self._all.noted.call().get(TIMEOUT_S))  # the answer comes after them: all have been handled
        elapsed = perf_counter_ns() - begin
        if noted != self._plan.procs * self._plan.broadcasts:
            raise BenchmarkError(f"{noted} of {self._plan.procs * self._plan.broadcasts} messages have arrived")
        return [elapsed]

    def _send_bulk(self) -> list[int]:
        def send() -> None:
            if self._one.nbytes.call_one(self._bulk).get(TIMEOUT_S) != self._plan.bulk_nbytes:
                raise BenchmarkError("the bulk argument did not arrive whole")

        return time_runs(send, 2)
