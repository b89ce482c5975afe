"""Acknowledgements of several processes that answer while others end."""

from skipper.control.model.future import Promise
from skipper.control.runtime.messages import Loss
from skipper.control.runtime.ports import Acknowledgements
from skipper.control.wire.messages import Kind
from skipper.control.wire.process_ref import ProcessRef
from tests.control.conftest import PATIENCE_S

COUNT = 20


def test_answers_that_come_while_an_end_is_looked_at_are_counted() -> None:
    answering = iter(range(COUNT))

    class Id(str):
        """The id of a process. Whenever somebody compares it, an answer comes, as on another thread."""

        def __eq__(self, other: object) -> bool:
            for rank in answering:
                acknowledgements.deliver(rank, Kind.REPLY, ())
                break
            return str(self) == str(other)

        __hash__ = str.__hash__

    promise: Promise[None] = Promise()
    acknowledgements = Acknowledgements(promise, [Id(number) for number in range(COUNT)])
    for number in range(COUNT):
        gone = ProcessRef(str(number), "", "")
        acknowledgements.process_lost(Id(number), Loss.of(gone, "it is gone", in_good_order=False))
    promise.get(PATIENCE_S)
