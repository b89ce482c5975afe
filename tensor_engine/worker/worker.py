"""`Worker`: the actor that runs a stream's instructions in a process of the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skipper.control import Actor, Port, context, endpoint
from skipper.tensor_engine.shared.encoding import unpack, unpack_code
from skipper.tensor_engine.worker.device import choose, use_own_cuda_stream
from skipper.tensor_engine.worker.handover import end_session
from skipper.tensor_engine.worker.heap import Poison, forget_heap, heap_of, lose
from skipper.tensor_engine.worker.interpreter import Interpreter, resolve
from skipper.tensor_engine.worker.random_state import seed_worker


class Worker(Actor):
    """Runs instructions in their order, and answers questions about the values that they make.

    Args:
        session: number of the session.
        stream: number of the stream; 0 is the main one.
        errors: where failed instructions are reported.
        numbers: of the workers of the session, by rank.
        lost: by rank, the numbers of the values that the stream had in the process that this one has replaced.
    """

    def __init__(
        self,
        session: int,
        stream: int,
        errors: Port[Poison],
        numbers: Sequence[int],
        lost: Mapping[int, Sequence[int]],
    ) -> None:
        here = context().actor_instance.rank
        choose(here.rank)
        if stream:
            use_own_cuda_stream()
        else:
            seed_worker(here.rank)
        lose(session, here.rank, lost.get(here.rank, ()))
        number = numbers[here.rank]
        self._interpreter = Interpreter(session, stream, here.rank, here.extent, heap_of(session), errors.send, number)

    @endpoint
    def run(self, instruction_stream: int, first: int, definitions: bytes, code: bytes, constants: Any) -> int:
        """Run a batch of instructions (see `Interpreter.execute`)."""
        interpreter = self._interpreter
        forgotten = interpreter.define(unpack(definitions)) if definitions else ()
        reached = interpreter.execute(instruction_stream, first, unpack_code(code), unpack(constants))
        if forgotten:
            interpreter.forget(forgotten)
        return reached

    @endpoint
    def sync(self) -> None:
        """Answer once everything before has been run."""

    @endpoint
    def ask(self, function: str, ref: int, argument: Any) -> Any:
        """Answer with ``function(worker, value, argument)``, for the function ``module:name`` and a value by number.

        Poison is returned unchanged. A value that is not here is None, and so is number 0.
        """
        value = self._interpreter.heap.get(ref)
        if type(value) is Poison:
            return value
        return resolve(function)(self._interpreter, value, argument)

    def __cleanup__(self, error: Exception | None) -> None:
        """Release the values of the session."""
        self._interpreter.close()
        if self._interpreter.stream == 0:
            end_session(self._interpreter.session)
            forget_heap(self._interpreter.session)
