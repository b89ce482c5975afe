"""The wait for what a earlier work of its stream, with marks that a test reaches: whether a GPU is there or not."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from skipper.dataplane import RegistrationError, TransferError, TransferTimeoutError, stream_order, tensors
from skipper.dataplane.operation import DONE, Operation


class Mark:
    """In place of a CUDA event: `query` says whether a test has set it, or raises as a broken device does."""

    def __init__(self, error: RuntimeError | None = None) -> None:
        self.is_reached = threading.Event()
        self._error = error

    def query(self) -> bool:
        if self._error is not None:
            raise self._error
        return self.is_reached.is_set()


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the streams of all devices have left to do."""
    left: list[Any] = []

    def of(devices: Iterable[int]) -> list[Any]:
        return list(left)

    monkeypatch.setattr(tensors, "marks", of)
    return left


def begun(begins: list[float], operation: Operation = DONE) -> Callable[[float], Operation]:
    def begin(left_s: float) -> Operation:
        begins.append(left_s)
        return operation

    return begin


def test_a_transfer_begins_at_once_where_the_streams_have_nothing_left(marks: list[Any]) -> None:
    begins: list[float] = []
    assert stream_order.begin_in_order([0], 5.0, begun(begins)) is DONE
    assert begins == [5.0]


def test_a_transfer_begins_when_every_mark_is_reached_and_the_caller_need_not_wait(marks: list[Any]) -> None:
    first, second = Mark(), Mark()
    marks += [first, second]
    begins: list[float] = []
    operation = stream_order.begin_in_order([0, 1], 30.0, begun(begins))
    first.is_reached.set()
    with pytest.raises(TransferTimeoutError, match="goes on"):
        operation.get(0.05)
    assert not begins
    assert not operation.done()
    second.is_reached.set()
    operation.get(20)
    assert 0 < begins[0] < 30


def test_a_kernel_that_does_not_end_costs_no_more_than_the_timeout(marks: list[Any]) -> None:
    marks.append(Mark())
    begins: list[float] = []
    begin = time.monotonic()
    operation = stream_order.begin_in_order([0], 0.1, begun(begins))
    with pytest.raises(TransferTimeoutError, match="earlier work of its stream"):
        operation.get(20)
    assert time.monotonic() - begin >= 0.1
    assert not begins


def test_what_fails_after_the_wait_is_the_error_of_the_operation(marks: list[Any]) -> None:
    reached = Mark()
    marks.append(reached)
    failed = Operation.failed(TransferError("the wire was cut"))
    operation = stream_order.begin_in_order([0], 20.0, begun([], failed))
    reached.is_reached.set()
    with pytest.raises(TransferError, match="the wire was cut"):
        operation.get(20)


def test_an_error_of_the_device_is_a_typed_one(marks: list[Any]) -> None:
    marks.append(Mark(RuntimeError("CUDA error: an illegal memory access was encountered")))
    operation = stream_order.begin_in_order([0], 20.0, begun([]))
    with pytest.raises(TransferError, match="given before the transfer: CUDA error: an illegal"):
        operation.get(20)
    with pytest.raises(RegistrationError, match=r"cannot be exported: .*illegal"):
        stream_order.require_done(marks)


async def test_an_operation_that_waits_for_a_stream_can_be_awaited(marks: list[Any]) -> None:
    mark = Mark()
    marks.append(mark)
    operation = stream_order.begin_in_order([0], 20.0, begun([]))
    mark.is_reached.set()
    await operation
