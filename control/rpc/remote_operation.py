"""`RemoteOperation`: a call that runs on its server without a time limit."""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from skipper.control.model.bounds import check_optional_seconds, check_seconds
from skipper.control.model.errors import ControlError, DeadlineError
from skipper.control.model.future import Future, Promise
from skipper.control.rpc.attempts import Attempts, may_retry, wait_s
from skipper.control.rpc.backends import ActorBackend, ActorBackends
from skipper.control.rpc.encoding import error_of, open_answer
from skipper.control.rpc.wire.messages import CallResult, MethodCall, OperationQuery, OperationState, Start

R = TypeVar("R")
T = TypeVar("T")

_WAIT_S = 10.0
"""The server answers a poll for the end after this time at the latest."""

_ANSWER_WITHIN_S = 15.0


class RemoteOperation(Generic[R]):
    """A call that runs on its server. It continues without a client that waits for it, until `cancel`.

    The server keeps the result for ten minutes; after that, or after a restart of the server, `OperationNotFoundError`
    is raised.

    Attributes:
        id: the id of the operation.

    Example:
        ```python
        from skipper.control.rpc import ActorServer, FixedResolver, RemoteOperation, RpcClient

        class Evaluation:
            def run(self, samples: int) -> str:
                return f"{samples} samples"

        with ActorServer("127.0.0.1", 0) as server:
            server.register("evaluation", Evaluation())
            client = RpcClient(FixedResolver(f"actor://{server.address}/evaluation"), Evaluation)
            operation: RemoteOperation[str] = client.run.start(8).get()
            print(operation.result(timeout=60).get())  # 8 samples
        ```
    """

    def __init__(
        self, operation_id: str, backends: ActorBackends, backend: ActorBackend, method: str, retries: int
    ) -> None:
        self.id = operation_id
        self._backend = backend
        self._actor = backends.name
        self._method = method
        self._retries = retries
        backends.keep(backend)
        weakref.finalize(self, backends.give_back, backend)

    def poll(self, *, wait_s: float = 0.0) -> Future[bool]:
        """Whether it has ended; the answer comes when it has, or after ``wait_s`` seconds, at most 20.

        Raises, as a future: OperationNotFoundError, or what a call raises that cannot be delivered.
        """
        seconds = check_seconds("wait_s", wait_s)
        return beside(lambda: self._ask(self._backend.channel.poll, seconds).answer is not None)

    def result(self, *, timeout: float | None = None) -> Future[R]:
        """A future of the method's result, which raises what a call raises.

        Args:
            timeout: seconds; the operation continues after them.
        """
        seconds = check_optional_seconds("timeout", timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        return beside(lambda: self._wait(deadline))

    def cancel(self) -> Future[bool]:
        """Cancel it: an ``async`` method is cancelled, any other can find out by `control.rpc.is_cancelled`.

        Returns:
            A future: whether it was cancelled; False if it had ended by itself.
        """

        def cancel() -> bool:
            had_ended = self._ask(self._backend.channel.poll, 0).answer is not None
            self._ask(self._backend.channel.cancel, 0)
            return not had_ended

        return beside(cancel)

    def _wait(self, deadline: float | None) -> R:
        failed = 0
        while True:
            left = _WAIT_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"{self._actor}.{self._method} has not ended in time; it goes on")
            try:
                state = self._ask(self._backend.channel.poll, min(left, _WAIT_S))
            except ControlError as error:
                failed += 1
                if failed > self._retries or not may_retry(error, is_idempotent=True):
                    raise
                time.sleep(wait_s(failed))
            else:
                failed = 0
                if state.answer is not None:
                    return cast(R, open_answer(state.answer, actor=self._actor, method=self._method))

    def _ask(self, ask: Callable[[OperationQuery, float], OperationState], wait: float) -> OperationState:
        state = ask(OperationQuery(self.id, wait), wait + _ANSWER_WITHIN_S)
        if state.failure is not None:
            raise error_of(state.failure, actor=self._actor, method=self._method)
        return state

    def __repr__(self) -> str:
        return f"<RemoteOperation {self._actor}.{self._method} {self.id}>"


def start_operation(attempts: Attempts, retries: int) -> Future[RemoteOperation[Any]]:
    """Start a call as an operation, on a separate thread."""
    operation_id = secrets.token_hex(16)
    taken: list[RemoteOperation[Any]] = []

    def send(backend: ActorBackend, call: MethodCall, timeout: float | None) -> CallResult:
        state = backend.channel.start(Start(operation_id, call), timeout)
        if state.failure is not None:
            return CallResult(failure=state.failure)
        taken.append(RemoteOperation(operation_id, attempts.backends, backend, attempts.method, retries))
        return CallResult()

    def start() -> RemoteOperation[Any]:
        outcome = attempts.run(send)
        if isinstance(outcome, ControlError):
            raise outcome
        if outcome.failure is not None:
            raise error_of(outcome.failure, actor=attempts.backends.name, method=attempts.method)
        return taken[0]

    return beside(start)


def beside(work: Callable[[], T]) -> Future[T]:
    """Run a function on a separate thread; returns a future of its result."""
    future: Promise[T] = Promise()

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  (the code that waits raises it)
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="rpc-beside", daemon=True).start()
    return future
