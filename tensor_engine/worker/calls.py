"""Sites of everything that is no operation of torch: functions of this package, named by module and name."""

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
    """What a function is called for, the same in each of its instructions.

    Attributes:
        function: where it lies, as ``module:name``. It is called as ``function(worker, call, inputs, constant)`` with
            the `Interpreter`, this object, what the inputs are on this worker (None for one that it does not have)
            and the instruction's constant, with autograd enabled. It returns a sequence of the outputs; None in place
            of one means that this worker has none. What it raises poisons all of them.
        name: for people.
        inputs: how many inputs it takes.
        outputs: what the script takes the outputs to be.
        static: what else it has to know; hashable and picklable.
        has_constant: whether each instruction brings a constant; else it is None.
        sees_poison: whether it is called with `Poison` among the inputs, and may return some. Otherwise poison in the
            inputs is the outputs', and it is not called.
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
    """The maker of the worker's part of calls."""
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
    """Call the function of a call.

    Returns:
        Its outputs; None for those that this worker does not have.
    """
    if not call.sees_poison and any(type(value) is Poison for value in inputs):
        raise _PoisonedError  # the interpreter finds the poison
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
