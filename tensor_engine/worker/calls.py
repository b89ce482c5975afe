"""Sites of everything that is not an operation of torch: functions of this package, given by module and name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from skipper.tensor_engine.shared.metadata import TensorMetadata
from skipper.tensor_engine.worker.heap import Heap, Poison
from skipper.tensor_engine.worker.interpreter import Interpreter, Run, Site, resolve


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a function; the same for all its instructions.

    Attributes:
        function: its path, ``module:name``. It is called as ``function(worker, call, inputs, constant)`` with the
            `Interpreter`, this object, the inputs on this worker (None for an input that it does not have) and the
            instruction's constant, with autograd enabled. It returns a sequence of the outputs; None in place of one
            means that this worker has none. An exception poisons all of them.
        name: for people.
        inputs: how many inputs it takes.
        outputs: the expected metadata of the outputs.
        static: further data for it; hashable and picklable.
        has_constant: whether each instruction brings a constant; else it is None.
        sees_poison: whether it is called with `Poison` among the inputs, and may return some. Otherwise it is not
            called, and the poison of the inputs becomes the outputs'.
        writes: which inputs it changes.
    """

    function: str
    name: str
    inputs: int
    outputs: tuple[TensorMetadata, ...]
    static: Any = None
    has_constant: bool = False
    sees_poison: bool = False
    writes: tuple[int, ...] = ()


def call_site(worker: Interpreter, site: Site, call: FunctionCall) -> Run:
    """Makes the worker's part of calls."""
    function: Callable[..., Sequence[Any] | None] = resolve(call.function)
    first_input = 1 + len(call.outputs)
    end = first_input + call.inputs

    def run(heap: Heap, code: Sequence[int], at: int, constants: Sequence[Any], constant: int) -> None:
        inputs = [heap.get(ref) for ref in code[at + first_input : at + end]]
        results = invoke(function, worker, call, inputs, constants[constant] if call.has_constant else None)
        for index, result in enumerate(results):
            if result is not None:
                heap[code[at + 1 + index]] = result

    return run


def invoke(
    function: Callable[..., Sequence[Any] | None],
    worker: Interpreter,
    call: FunctionCall,
    inputs: list[Any],
    constant: Any,
) -> Sequence[Any]:
    """Call the function.

    Returns:
        Its outputs; None for those that this worker does not have.
    """
    if not call.sees_poison and any(type(value) is Poison for value in inputs):
        raise _PoisonedError  # the interpreter then finds the poison
    with torch.enable_grad():
        results = function(worker, call, inputs, constant)
    if not call.outputs:
        return ()
    if results is None or len(results) != len(call.outputs):
        raise RuntimeError(f"{call.name} has to return {len(call.outputs)} outputs, and has returned {results!r:.100}")
    return [
        result.detach() if isinstance(result, torch.Tensor) and result.requires_grad else result for result in results
    ]


class _PoisonedError(Exception):
    """An input is poison."""
