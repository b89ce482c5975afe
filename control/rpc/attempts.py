"""`Attempts`: one call, from its first attempt to its last."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from skipper.control.model.errors import (
    ConnectionLostError,
    ControlError,
    DeadlineError,
    HandleExpiredError,
    RpcError,
    SupervisionError,
    UnreachableError,
)
from skipper.control.rpc.encoding import error_of
from skipper.control.rpc.endpoints import Endpoint, Endpoints
from skipper.control.rpc.retry import may_retry, wait_s
from skipper.control.rpc.wire.calls import Answer, Call, Code, Segments

Outcome = Answer | ControlError
"""How a call, or one attempt, ended: in what a server has answered, or in why there is no answer."""

Send = Callable[[Endpoint, Call, float | None], Answer]

_SERVER_IS_GONE = (UnreachableError, ConnectionLostError)
_ACTOR_IS_GONE = (Code.HANDLE_EXPIRED, Code.NO_SUCH_ACTOR, Code.ACTOR_DEAD)


def _invoke(endpoint: Endpoint, call: Call, timeout: float | None) -> Answer:
    return endpoint.channel.invoke(call, timeout)


class Attempts:
    """A call, which is made once: by `run` or by `begin`.

    Args:
        endpoints: where it can go.
        method: what is called.
        segments: with which arguments.
        deadline: of all attempts together, as `time.monotonic` counts, or None.
        retries: how many attempts there may be besides the first.
        is_idempotent: whether the method may run twice.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        method: str,
        segments: Segments,
        *,
        deadline: float | None,
        retries: int,
        is_idempotent: bool,
    ) -> None:
        self.endpoints = endpoints
        self.method = method
        self._segments = segments
        self._deadline = deadline
        self._retries = retries
        self._is_idempotent = is_idempotent
        self._surely = retries > 0 and not is_idempotent
        """Whether a server is worth a question before the call: if the call is lost there, it cannot be made again."""
        self._made = 0

    def run(self, send: Send = _invoke) -> Outcome:
        """Make attempts in this thread until one of them settles the matter.

        Args:
            send: how a request is sent.
        """
        while True:
            outcome = self._attempt(send)
            failure = self._worth_another(outcome)
            if failure is None:
                return outcome
            if not self._pause():
                late = DeadlineError(f"no time is left for another attempt after {self._made}: {failure}")
                late.__cause__ = failure
                return late

    def begin(self, done: Callable[[Outcome], None]) -> None:
        """Make the first attempt without waiting for its end, if that is possible, and the others beside.

        Args:
            done: told how the call has ended, on a thread that must not be held up.
        """
        endpoint = self.endpoints.take_ready(surely=self._surely)
        if endpoint is None:
            self._run_beside(done)
            return
        self._made = 1

        def ended(outcome: Outcome) -> None:
            self._conclude(endpoint, outcome)
            if _is_session_ended(outcome):
                self._made = 0  # nobody has looked at it
                self._run_beside(done)
            elif self._worth_another(outcome) is None:
                done(outcome)
            else:
                self._run_beside(done, after_pause=True)

        try:
            endpoint.channel.begin(self._call(endpoint), self._remaining_s(), ended)
        except ControlError as error:
            ended(error)

    def _attempt(self, send: Send) -> Outcome:
        self._made += 1
        try:
            endpoint = self.endpoints.take(self._deadline, surely=self._surely)
        except ControlError as error:
            return error
        outcome: Outcome
        try:
            outcome = send(endpoint, self._call(endpoint), self._remaining_s())
        except ControlError as error:
            outcome = error
        self._conclude(endpoint, outcome)
        return outcome

    def _call(self, endpoint: Endpoint) -> Call:
        return Call(self.method, self._segments, endpoint.handle or "")

    def _conclude(self, endpoint: Endpoint, outcome: Outcome) -> None:
        """Have what is known of an endpoint follow from how an attempt ended there."""
        if isinstance(outcome, Answer):
            if outcome.failure is not None and outcome.failure.code in _ACTOR_IS_GONE:
                self.endpoints.expired(endpoint)
            self.endpoints.give_back(endpoint)
        else:
            is_gone = isinstance(outcome, _SERVER_IS_GONE) and not _is_session_ended(outcome)
            self.endpoints.give_back(endpoint, is_out_of_reach=is_gone)

    def _worth_another(self, outcome: Outcome) -> ControlError | None:
        """Why there should be another attempt, or None."""
        error = outcome
        if isinstance(error, Answer):
            if error.failure is None or error.failure.code is Code.RAISED:
                return None
            error = error_of(error.failure, actor=self.endpoints.name, method=self.method)
        if self._made > self._retries or not may_retry(error, is_idempotent=self._is_idempotent):
            return None
        is_final = self.endpoints.pinned is not None and isinstance(error, HandleExpiredError | SupervisionError)
        return None if is_final else error

    def _pause(self) -> bool:
        """Wait before the next attempt; False where no time is left for one."""
        wait = wait_s(self._made)
        left = self._remaining_s()
        if left is not None and wait >= left:
            return False
        time.sleep(wait)
        return True

    def _remaining_s(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0)

    def _run_beside(self, done: Callable[[Outcome], None], *, after_pause: bool = False) -> None:
        def work() -> None:
            try:
                if after_pause and not self._pause():
                    outcome: Outcome = DeadlineError(f"no time is left for another attempt after {self._made}")
                else:
                    outcome = self.run()
            except Exception as error:  # noqa: BLE001  (a defect must not leave the caller waiting)
                outcome = RpcError(f"the call failed in a way that it should not: {error!r}")
                outcome.__cause__ = error
            done(outcome)

        threading.Thread(target=work, name="rpc-attempts", daemon=True).start()


def _is_session_ended(outcome: Outcome) -> bool:
    from skipper.control.rpc.wire.channel import SessionEndedError

    return isinstance(outcome, SessionEndedError)
