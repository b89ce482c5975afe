"""`compile`: the instructions of a function are recorded and sent once, and replayed by one message."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

import torch

from skipper.dataplane.uncollected import uncollected
from skipper.tensor_engine.errors import CompileError
from skipper.tensor_engine.script import recording
from skipper.tensor_engine.script.guards import CallKey, Guarding, TraceSurroundings, gradients, look_at
from skipper.tensor_engine.script.instruction_stream import InstructionStream
from skipper.tensor_engine.script.recording import TraceRecorder
from skipper.tensor_engine.script.tensor import Tensor
from skipper.tensor_engine.script.trace_compiler import compile_trace
from skipper.tensor_engine.script.traced import Traced

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("skipper.tensor_engine")

_tracing = threading.Lock()


class CompiledFunction(Generic[P, R]):
    """A function that the first call of a kind traces, and later ones replay. Made by `compile`.

    Example:
        ```python
        import torch

        from skipper.control import this_host
        from skipper.tensor_engine import compile, inspect

        @compile
        def step(x: torch.Tensor) -> torch.Tensor:
            return (x * 2).sum()

        with this_host().spawn_procs().activate():
            x = torch.ones(4)
            first, second = step(x), step(x)  # traced once, then replayed by one message
        print(inspect(second))  # tensor(8.)
        ```
    """

    def __init__(self, function: Callable[P, R], programs: int, worker_compile: str | None) -> None:
        functools.update_wrapper(self, function)
        self.__wrapped__ = function
        self._function = function
        self._limit = programs
        self._backend = worker_compile
        self._able: set[int] = set()  # numbers of the instruction streams whose workers can compile with it
        self._programs: dict[CallKey, list[Traced]] = {}
        self._order: list[tuple[CallKey, Traced]] = []
        self._unsettled: set[CallKey] = set()
        self._has_warned = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, by a replay if there has been a call like this one."""
        if recording.is_tracing():
            return self._function(*args, **kwargs)  # it becomes a part of the calling function's program
        key, tensors = look_at(args, kwargs)
        for traced in reversed(self._programs.get(key, ())):
            if traced.holds():
                return cast(R, traced.replay(tensors))
        return cast(R, self._trace(key, tensors, args, kwargs))

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    @property
    def programs(self) -> int:
        """How many programs it has."""
        return len(self._order)

    def clear(self) -> None:
        """Forget all programs, here and on the workers. The next call traces again."""
        self._programs.clear()
        self._order.clear()
        self._unsettled.clear()

    def _trace(self, key: CallKey, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        with _tracing, uncollected():
            surroundings = TraceSurroundings()
            before = gradients()
            recorder = recording.current = TraceRecorder()
            token = recording.traced.set(recorder)
            try:
                with surroundings, Guarding(), torch.autograd.set_multithreading_enabled(False):
                    result = [self._function(*args, **kwargs)]  # only this list may hold it
            finally:
                recording.traced.reset(token)
                recording.current = None
                recorder.end_borrows()
            if recorder.refusal is not None:
                raise recorder.refusal
            name = getattr(self._function, "__qualname__", repr(self._function))
            traced, made = compile_trace(name, recorder, tensors, result, before, surroundings, self._backend)
        if self._backend is not None:
            for instruction_stream in traced.instruction_streams:
                self._require_backend(instruction_stream, self._backend)
        # The first call may create what later ones find, such as the state of optimizers, so the second is traced
        # again.
        if traced.leaves_more and key not in self._unsettled:
            self._unsettled.add(key)
            return made
        self._unsettled.discard(key)
        self._programs.setdefault(key, []).append(traced)
        self._order.append((key, traced))
        if len(self._order) > self._limit:
            self._drop_oldest()
        return made

    def _require_backend(self, instruction_stream: InstructionStream, backend: str) -> None:
        """Ask the workers, once, whether they can compile.

        Raises:
            CompileError: one of them cannot.
        """
        if instruction_stream.number in self._able:
            return
        with instruction_stream.session.lock:
            instruction_stream.session.check()
            answers = instruction_stream.actors.ask.call(
                "skipper.tensor_engine.worker.compiled_regions:refusal", 0, backend
            )
        for rank, refusal in zip(instruction_stream.ranks, answers.get(), strict=True):
            if refusal is not None:
                raise CompileError(f"rank {rank} cannot compile with worker_compile={backend!r}: {refusal}")
        self._able.add(instruction_stream.number)

    def _drop_oldest(self) -> None:
        key, oldest = self._order.pop(0)
        self._programs[key].remove(oldest)
        if not self._programs[key]:
            del self._programs[key]
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s has been traced for more than %d kinds of calls; each new one costs an eager call. Arguments and "
                "settings of optimizers that change with every call can be made tensors of the mesh",
                getattr(self._function, "__qualname__", self._function),
                self._limit,
            )


@overload
def compile(
    function: Callable[P, R], *, programs: int = ..., worker_compile: str | None = ...
) -> CompiledFunction[P, R]: ...


@overload
def compile(
    *, programs: int = ..., worker_compile: str | None = ...
) -> Callable[[Callable[P, R]], CompiledFunction[P, R]]: ...


def compile(
    function: Callable[..., Any] | None = None, *, programs: int = 16, worker_compile: str | None = None
) -> Any:
    """Replay a function by one message, in place of one instruction for each of its operations.

    The first call runs eagerly, and its instructions are recorded. A later call with arguments of the same kind sends
    the number of the program and the numbers of its tensors; the workers do the rest. A whole training step can be
    compiled: forward, ``backward()``, reductions, ``optimizer.step()`` and ``zero_grad()``.

    A call is of the same kind if its tensors agree in shape, dtype, strides, mesh, stream, ``requires_grad`` and in
    which of them share memory; its other arguments are equal; and the following are the same: grad mode, autocast, the
    active mesh and stream, the modes of the modules and the settings of the optimizers that it uses, and which of the
    tensors that it uses require or have a gradient. The first call of another kind is traced as well. All other values
    that the function takes from the script stay as they were in the trace: numbers in variables,
    ``torch.tensor(data)``, and the attributes that hold tensors. Python code of the function, such as a counter, runs
    only in a trace; `torch.compiler.is_compiling` is true there, except in the steps of optimizers.

    Tensors from outside the function, such as parameters and the state of optimizers, are the same ones in each replay,
    and changed in place as usual. What the function returns is new each time. Other tensors that it stores somewhere,
    such as the ``grad`` of parameters, are overwritten by each replay. If a trace stores tensors that are not
    gradients, the next call is traced once more, because state may be made at the first call only.

    Streams may borrow tensors, if the function also ends these borrows: replays do both, and keep the order between
    the streams. A replay then takes a few messages.

    Args:
        function: the function to compile. It must not fetch values.
        programs: how many kinds of calls are remembered; the oldest one is forgotten first, here and on the workers.
        worker_compile: a backend of `torch.compile`, such as ``"inductor"``, with which each worker compiles the
            program: regions of operations between collectives, remote functions, random numbers and changes of tensors
            that existed before. Memory is shared as without it; numbers are those of the backend, equal except for
            rounding. What it cannot compile runs as without it, and the worker logs a warning.

    Returns:
        The function; or, without one, a decorator.

    Raises:
        CompileError: at a call: the function does something that cannot be replayed, or a worker cannot compile with
            that backend, for example because it has no C++ compiler; the message says which.
        ValueError: ``programs`` is not positive.
    """
    if programs < 1:
        raise ValueError(f"programs= must be at least 1, not {programs}")
    if function is None:
        return functools.partial(compile, programs=programs, worker_compile=worker_compile)
    return CompiledFunction(function, programs, worker_compile)
