"""Programs on a worker, without a script."""

import torch

from skipper.tensor_engine.shared.encoding import Form
from skipper.tensor_engine.shared.metadata import metadata_of
from skipper.tensor_engine.shared.program import CALL, GET_BACK, GIVE_BACK, LEND, TAKE, CompiledProgram, ProgramStep
from skipper.tensor_engine.worker.calls import FunctionCall
from skipper.tensor_engine.worker.handover import end_session
from skipper.tensor_engine.worker.heap import Heap, Poison
from skipper.tensor_engine.worker.interpreter import Interpreter
from skipper.tensor_engine.worker.replay import Replay

SESSION = 1 << 60


def part(function: str) -> tuple[Form, FunctionCall]:
    """A site for a part of a borrow."""
    outputs = (metadata_of(torch.zeros(2)),) if function == TAKE else ()
    inputs = 0 if function == TAKE else 1
    call = FunctionCall(function, "borrow", inputs, outputs, has_constant=True, sees_poison=True)
    return Form(CALL, "borrow", len(outputs), inputs, 1), call


def test_a_step_that_this_worker_cannot_make_fails_alone_and_holds_up_no_other_stream() -> None:
    heap: Heap = {1: torch.ones(2)}
    failed: list[Poison] = []
    broken = Form("tests.tensor_engine.on_workers:cannot_be_made", "broken", 1, 1), None
    steps = ProgramStep(0, (2,), (1,), ()), ProgramStep(1, (), (1,), (0,)), ProgramStep(2, (), (1,), (0,))
    taking = ProgramStep(0, (3,), (), (0,)), ProgramStep(1, (), (3,), (0,))
    owner, borrower = (Interpreter(SESSION, stream, 0, {}, heap, failed.append) for stream in range(2))
    lends = Replay(owner, CompiledProgram("lends", (broken, part(LEND)), steps[:2], (1,), (), (2,), (), borrows=True))
    takes = Replay(
        borrower, CompiledProgram("takes", (part(TAKE), part(GIVE_BACK)), taking, (), (), (3,), (), borrows=True)
    )
    gets = Replay(
        owner, CompiledProgram("gets", (broken, part(LEND), part(GET_BACK)), steps[2:], (1,), (), (), (), borrows=True)
    )
    try:
        for number in range(3):
            lends.run(heap, [0, 10, 1], 0, [7 * number], 0)
            takes.run(heap, [0, 20], 0, [7 * number], 0)
            gets.run(heap, [0, 1], 0, [7 * number], 0)
            assert isinstance(heap.pop(10), Poison)
            assert heap.pop(20).tolist() == [1, 1]
    finally:
        end_session(SESSION)
    assert [each.summary for each in failed] == ["ImportError: told to fail"] * 3
    assert owner.first_borrow == borrower.first_borrow == 0
    assert list(heap) == [1]
