"""What is measured, in turns: the engine, raw gRPC, actors, eager torch and memcpy."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import torch

from skipper import control, tensor_engine
from skipper.benchmarks.actors.parties import Echo
from skipper.benchmarks.actors.raw_grpc import RawGrpc
from skipper.benchmarks.dispatch.steps import USUAL_NETWORK, EngineStep, TrainedNetwork, ddp_steps
from skipper.benchmarks.statistics import Contestant, Schedule, WholeRounds, interleave, time_runs
from skipper.control import ProcMesh
from skipper.tensor_engine import Tensor, inspect
from skipper.tensor_engine.script.fetch import ask
from skipper.tensor_engine.script.issue import issue_call
from skipper.tensor_engine.script.session import session_of

__all__ = ["BULK_NBYTES", "ELEMENTS", "GROUPS", "MESSAGE_NBYTES", "PROGRAM_OPS", "DispatchPlan", "Times", "measure"]

MESSAGE_NBYTES = 100
"""Bytes of the message of a raw gRPC call, and of a call of an actor."""

ELEMENTS = 16
"""Elements of the tensors whose operations are timed: so few that the operation itself takes almost no time."""

PROGRAM_OPS = 120
"""Operations of the compiled program."""

BULK_NBYTES = 64 << 20
TIMEOUT_S = 120.0

GROUPS = 3
"""Groups of figures; those of a group are measured in turns, one group after another."""

_HOLD_S = 0.25


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """How much is measured.

    Attributes:
        rounds: Blocks of each kind.
        ops: Operations in a block.
        calls: Calls, and fetches, in a block.
        few: Workers of the smaller mesh.
        many: Workers of the larger mesh.
        warmup: Rounds that are not counted.
        steps: Steps of training in a block.
        network: What these train.
    """

    rounds: int = 20
    ops: int = 2000
    calls: int = 60
    few: int = 2
    many: int = 16
    warmup: int = 2
    steps: int = 20
    network: TrainedNetwork = USUAL_NETWORK


Block = Callable[[], Sequence[float]]
"""A block of work; returns durations in ns."""

Times = dict[str, list[float]]
"""Durations in ns by what took them; for operations, per operation."""


def measure(plan: DispatchPlan, times: Times, on_round: Callable[[int], None] | None = None) -> None:
    """Run the plan, and leave no process behind.

    Args:
        plan: How much is measured.
        times: Gets what was measured, the figures of a round once it is complete.
        on_round: Called with the number of rounds after each; the number starts again for each group of figures.

    Raises:
        ControlError: A call failed.
        TensorEngineError: An operation failed.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(control.shutdown)
        stack.callback(tensor_engine.shutdown)
        raw = stack.enter_context(RawGrpc.start())
        work = _Work(plan, raw)
        for blocks in (work.few_blocks, work.both_blocks, functools.partial(work.step_blocks, stack)):
            rounds = WholeRounds(times, on_round)  # of one of the `GROUPS`
            contestants = [
                Contestant(name, functools.partial(_run, rounds, name, block)) for name, block in blocks().items()
            ]
            interleave(contestants, Schedule(plan.rounds, warmup=plan.warmup), after_round=rounds.end_round)


def _run(rounds: WholeRounds[float], name: str, block: Block) -> None:
    rounds.note(name, block())


class _Work:
    """The meshes of the run, and a function for each kind of block."""

    def __init__(self, plan: DispatchPlan, raw: RawGrpc) -> None:
        self._plan = plan
        self._raw = raw
        self._few = _spawn(plan.few)
        with self._few.activate():
            self._x, self._y = torch.ones(ELEMENTS), torch.ones(ELEMENTS)
            self._bulk = torch.ones(BULK_NBYTES // 4)
        self._replayed = tensor_engine.compile(_program)
        self._added = tensor_engine.compile(_sums)
        self._echo = self._few.spawn("echo", Echo).slice(gpus=0).echo
        self._message = bytes(MESSAGE_NBYTES)

    def few_blocks(self) -> dict[str, Block]:
        """Blocks that use the smaller mesh alone; further processes would only take cores from it."""
        calls, copy = self._plan.calls, _memcpy()
        return {
            "grpc_unary": lambda: self._raw.unary(calls, MESSAGE_NBYTES),
            "issue": lambda: self._issue(self._few, self._x, self._y),
            "replay": self._replay,
            "worker_op": self._run_there,
            "worker_replay_op": self._replay_there,
            "eager_op": self._run_eagerly,
            "call_one": lambda: time_runs(lambda: self._echo.call_one(self._message).get(TIMEOUT_S), calls),
            "fetch_small": lambda: time_runs(lambda: inspect(self._x, timeout=TIMEOUT_S), calls),
            "fetch_bulk": lambda: time_runs(lambda: inspect(self._bulk, timeout=TIMEOUT_S), 3),
            "memcpy": lambda: time_runs(copy, 3),
        }

    def both_blocks(self) -> dict[str, Block]:
        """Blocks that compare the two meshes."""
        many = _spawn(self._plan.many)
        with many.activate():
            x, y = torch.ones(ELEMENTS), torch.ones(ELEMENTS)
        session_of(many).synchronize(TIMEOUT_S)
        return {
            "issue_to_few": lambda: self._issue_to_held(self._few, self._x, self._y),
            "issue_to_many": lambda: self._issue_to_held(many, x, y),
        }

    def step_blocks(self, stack: contextlib.ExitStack) -> dict[str, Block]:
        """Blocks of the same training: by the engine, and by torch's DDP in plain processes."""
        step, count = EngineStep(self._few, self._plan.network), self._plan.steps
        return {
            "ddp_step": ddp_steps(stack, self._plan.few, count, self._plan.network),
            "step": lambda: step.plain(count),
            "compiled_step": lambda: step.compiled(count),
        }

    def _issue(self, mesh: ProcMesh, x: torch.Tensor, y: torch.Tensor) -> list[float]:
        """As many sums as scalings, whose results are dropped at once. The workers finish after the timed part."""
        count = self._plan.ops // 2
        begin = perf_counter_ns()
        for _ in range(count):
            x + y
            x * 0.5
        elapsed = perf_counter_ns() - begin
        session_of(mesh).synchronize(TIMEOUT_S)
        return [elapsed / (2 * count)]

    def _issue_to_held(self, mesh: ProcMesh, x: torch.Tensor, y: torch.Tensor) -> list[float]:
        """The same while the workers wait: on this one machine, so many of them would take cores from the script."""
        self._call("hold", _HOLD_S, mesh=mesh)
        session_of(mesh).flush()
        return self._issue(mesh, x, y)

    def _replay(self) -> list[float]:
        """Replays of a program, counted by its operations. The workers finish after the timed part."""
        count = max(self._plan.ops // PROGRAM_OPS, 8)
        self._replayed(self._x, self._y)  # traced, the first time
        session = session_of(self._few)
        session.synchronize(TIMEOUT_S)
        begin = perf_counter_ns()
        for _ in range(count):
            self._replayed(self._x, self._y)
        elapsed = perf_counter_ns() - begin
        session.synchronize(TIMEOUT_S)
        return [elapsed / (PROGRAM_OPS * count)]

    def _replay_there(self) -> list[float]:
        """Replays of sums alone, on a worker that waits until all of them have been sent."""
        count = max(self._plan.ops // PROGRAM_OPS, 8)
        for _ in range(3):  # traced, run step by step, written out
            self._added(self._x)
        with self._marked():
            for _ in range(count):
                self._added(self._x)
        return [self._ask("marked", None) / (PROGRAM_OPS * count)]

    def _run_there(self) -> list[float]:
        """From the first operation to the last, on a worker that waits until all of them have been sent."""
        with self._marked():
            for _ in range(self._plan.ops):
                self._x + self._x
        return [self._ask("marked", None) / self._plan.ops]

    @contextlib.contextmanager
    def _marked(self) -> Iterator[None]:
        """Have the workers wait for what the block issues, and mark where it begins and ends."""
        self._call("hold", _HOLD_S)
        self._call("mark")
        yield
        self._call("mark")

    def _run_eagerly(self) -> list[float]:
        """The same operations in a plain loop, in the process of the worker."""
        return [self._ask("eager", self._plan.ops) / self._plan.ops]

    def _call(self, function: str, constant: float | None = None, *, mesh: ProcMesh | None = None) -> None:
        mesh = mesh or self._few
        issue_call(
            f"skipper.benchmarks.dispatch.workers:{function}",
            (),
            (),
            instruction_stream=session_of(mesh).instruction_stream(mesh),
            mesh=mesh,
            constant=constant,
        )

    def _ask(self, function: str, argument: int | None) -> int:
        assert isinstance(self._x, Tensor)  # it was made under activate
        there = f"skipper.benchmarks.dispatch.workers:{function}"
        answer: int = ask(self._x.remote_value, 0, there, argument).get(TIMEOUT_S)
        return answer


def _program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for _ in range(PROGRAM_OPS // 2):
        x = (x + y) * 0.5
    return x


def _sums(x: torch.Tensor) -> torch.Tensor:
    for _ in range(PROGRAM_OPS):
        x = x + x
    return x


def _spawn(count: int) -> ProcMesh:
    # One thread for each process: with more threads than cores, their competition would be what is measured.
    return control.this_host().spawn_procs({"gpus": count}, env={"OMP_NUM_THREADS": "1"})


def _memcpy() -> Callable[[], object]:
    source, destination = torch.ones(BULK_NBYTES // 4), torch.zeros(BULK_NBYTES // 4)
    return lambda: ctypes.memmove(destination.data_ptr(), source.data_ptr(), BULK_NBYTES)
