"""The server's side of long calls, which clients start, poll and cancel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from skipper.control.rpc.scope import Scope
from skipper.control.rpc.wire import messages

MAX_RUNNING = 64
MAX_KEPT = 1024
KEPT_S = 600.0
"""How long after its end an operation can be queried."""

MAX_WAIT_S = 20.0
"""The longest wait of one poll, even if the client requests a longer one."""

_MARGIN_S = 0.05
"""An answer is sent this long before the deadline, so that it arrives in time."""


class Operations:
    """The operations of a server; for any number of threads. ``run`` calls a method, and waits for its end."""

    def __init__(
        self,
        run: Callable[[messages.MethodCall, Scope], messages.CallResult],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._clock = clock
        self._lock = threading.Lock()
        self._operations: dict[str, _RunningOperation] = {}
        self._running = 0

    def start(self, start: messages.Start) -> messages.OperationState:
        """Start an operation, unless there is one with this id."""
        with self._lock:
            self._sweep(MAX_KEPT - 1)
            operation = self._operations.get(start.id)
            if operation is not None:
                return operation.state()
            if self._running >= MAX_RUNNING or len(self._operations) >= MAX_KEPT:
                words = f"there are {self._running} operations that have not ended, the maximum"
                return messages.OperationState(start.id, failure=messages.CallFailure(messages.Code.BUSY, words))
            operation = self._operations[start.id] = _RunningOperation(start.id)
            self._running += 1
        threading.Thread(target=self._work, args=(operation, start.call), name="operation", daemon=True).start()
        return operation.state()

    def poll(self, query: messages.OperationQuery, remaining_s: float | None) -> messages.OperationState:
        """The state of an operation, once it has ended or the wait is over."""
        operation = self._find(query.id)
        if operation is None:
            return _unknown(query.id)
        left = MAX_WAIT_S if remaining_s is None else max(remaining_s - _MARGIN_S, 0)
        wait_s = query.wait_s if query.wait_s > 0 else 0.0  # NaN is not greater, either
        operation.ended.wait(min(wait_s, left, MAX_WAIT_S))
        return operation.state()

    def cancel(self, query: messages.OperationQuery) -> messages.OperationState:
        """Cancel an operation, unless it has ended."""
        operation = self._find(query.id)
        if operation is None:
            return _unknown(query.id)
        operation.end(
            messages.CallResult(failure=messages.CallFailure(messages.Code.CANCELLED, "the operation was cancelled")),
            self._clock(),
        )
        operation.scope.cancel()
        return operation.state()

    def cancel_all(self) -> None:
        """Cancel all running operations."""
        with self._lock:
            operations = list(self._operations.values())
        for operation in operations:
            self.cancel(messages.OperationQuery(operation.id))

    def _find(self, operation_id: str) -> _RunningOperation | None:
        with self._lock:
            self._sweep(MAX_KEPT)
            return self._operations.get(operation_id)

    def _work(self, operation: _RunningOperation, call: messages.MethodCall) -> None:
        try:
            operation.end(self._run(call, operation.scope), self._clock())
        finally:
            with self._lock:
                self._running -= 1

    def _sweep(self, most: int) -> None:
        """Forget operations that ended long ago; if there are more than ``most``, those that ended first."""
        now = self._clock()
        ended = {key: at for key, each in self._operations.items() if (at := each.ended_at) is not None}
        surplus = len(self._operations) - most
        for key in sorted(ended, key=lambda key: ended[key]):
            if surplus <= 0 and now - ended[key] < KEPT_S:
                break
            del self._operations[key]
            surplus -= 1


class _RunningOperation:
    """One running operation."""

    def __init__(self, operation_id: str) -> None:
        self.id = operation_id
        self.scope = Scope()
        self.ended = threading.Event()
        self.ended_at: float | None = None
        self._lock = threading.Lock()
        self._answer: messages.CallResult | None = None

    def end(self, answer: messages.CallResult, now: float) -> None:
        """Note its outcome, unless it has ended already."""
        with self._lock:
            if self._answer is not None:
                return
            self._answer = answer
            self.ended_at = now
        self.ended.set()

    def state(self) -> messages.OperationState:
        """Its state."""
        return messages.OperationState(self.id, self._answer)


def _unknown(operation_id: str) -> messages.OperationState:
    words = "this server knows no such operation: the server was restarted, or nobody asked for the result for too long"
    return messages.OperationState(operation_id, failure=messages.CallFailure(messages.Code.NO_SUCH_OPERATION, words))
