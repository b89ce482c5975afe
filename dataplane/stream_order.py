"""Transfers of GPU memory keep the order of the caller's streams.

A kernel that was queued before a transfer may still produce the bytes that the transfer reads, or read those that it
overwrites. So a transfer begins when the current streams of the calling thread have finished their earlier work. It
ends when its bytes have arrived; kernels that are queued after that see them, on any stream. If a stream has work left,
another thread waits for it, so that neither the caller nor the interpreter is blocked.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from skipper.dataplane import tensors
from skipper.dataplane.errors import RegistrationError, TransferError, TransferTimeoutError
from skipper.dataplane.operation import Operation

if TYPE_CHECKING:
    from skipper.dataplane.tensors import Mark

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 20e-6, 500e-6
_EXPORT_S = 60.0


def begin_in_order(devices: Iterable[int], timeout: float, begin: Callable[[float], Operation]) -> Operation:
    """Begin a transfer after the work that is queued on the calling thread's current streams of these GPUs.

    Args:
        devices: Indices of the GPUs of this process whose memory it touches.
        timeout: Seconds for the wait and the transfer together.
        begin: Begins it, with the seconds that are left.
    """
    deadline = time.monotonic() + timeout
    try:
        marks = tensors.marks(devices)
    except TransferError as error:
        return Operation.failed(error)
    if not marks:
        return begin(timeout)
    operation = Operation(1)

    def follow() -> None:
        try:
            _wait(marks, deadline)
            begin(max(deadline - time.monotonic(), _SHORTEST_WAIT_S)).get()
        except Exception as error:  # noqa: BLE001 - the error is the caller's, not this thread's
            operation.part_done(error)
        else:
            operation.part_done(None)

    threading.Thread(target=follow, name="dataplane-stream-order", daemon=True).start()
    return operation


def require_done(marks: "Sequence[Mark]") -> None:
    """Wait until these marks are reached, before other processes learn that they may read the results.

    Raises:
        RegistrationError: They are not reached within a minute, or the GPU reports an error.
    """
    try:
        _wait(marks, time.monotonic() + _EXPORT_S)
    except TransferError as error:
        raise RegistrationError(f"the memory of a GPU cannot be exported: {error}") from error


def _wait(marks: "Sequence[Mark]", deadline: float) -> None:
    pause_s = _SHORTEST_WAIT_S
    for mark in marks:
        while not tensors.reached(mark):
            if time.monotonic() > deadline:
                raise TransferTimeoutError(
                    "the deadline passed before a GPU had finished the earlier work of its stream"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)
