"""`Attempts`: one call from its first attempt to its last: what may be retried, and how soon."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from skipper.control.model.errors import (
    AuthenticationError,
    BackpressureError,
    ConnectionLostError,
    ControlError,
    DeadlineError,
    HandleExpiredError,
    NameNotFoundError,
    ResolverError,
    RpcError,
    SupervisionError,
    UnreachableError,
)
from skipper.control.rpc.backends import ActorBackend, ActorBackends
from skipper.control.rpc.encoding import error_of
from skipper.control.rpc.wire.messages import CallResult, Code, MethodCall, Segments

_UNDELIVERED = (
    AuthenticationError,
    BackpressureError,
    HandleExpiredError,
    NameNotFoundError,
    ResolverError,
    UnreachableError,
)
_UNKNOWN = (ConnectionLostError, SupervisionError)
FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 2.0

Outcome = CallResult | ControlError
"""How a call, or one attempt, ended: the answer of a server, or the reason why there is none."""

Send = Callable[[ActorBackend, MethodCall, float | None], CallResult]

_SERVER_IS_GONE = (UnreachableError, ConnectionLostError)
_ACTOR_IS_GONE = (Code.HANDLE_EXPIRED, Code.NO_SUCH_ACTOR, Code.ACTOR_DEAD)


def _invoke(backend: ActorBackend, call: MethodCall, timeout: float | None) -> CallResult:
    return backend.channel.invoke(call, timeout)


class Attempts:
    """A call, made once: by `run` or by `begin`.

    ``segments`` are its encoded arguments. The deadline, as `time.monotonic` counts, is for all attempts together.
    ``retries`` do not include the first attempt.
    """

    def __init__(
        self,
        backends: ActorBackends,
        method: str,
        segments: Segments,
        *,
        deadline: float | None,
        retries: int,
        is_idempotent: bool,
    ) -> None:
        self.backends = backends
        self.method = method
        self._segments = segments
        self._deadline = deadline
        self._retries = retries
        self._is_idempotent = is_idempotent
        self._surely = retries > 0 and not is_idempotent
        """Whether to check first that a server still answers: a lost call could not be repeated."""
        self._made = 0

    def run(self, send: Send = _invoke) -> Outcome:
        """Make attempts in this thread until no other one is needed, or allowed.

        Args:
            send: sends a request.
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
        """Make the first attempt without waiting for its end, if possible, and the others in the background.

        Args:
            done: called with the outcome, on a thread that must not be blocked.
        """
        backend = self.backends.take_ready(surely=self._surely)
        if backend is None:
            self._run_beside(done)
            return
        self._made = 1

        def ended(outcome: Outcome) -> None:
            self._conclude(backend, outcome)
            if _is_session_ended(outcome):
                self._made = 0  # the server has not seen it
                self._run_beside(done)
            elif self._worth_another(outcome) is None:
                done(outcome)
            else:
                self._run_beside(done, after_pause=True)

        try:
            backend.channel.begin(self._call(backend), self._remaining_s(), ended)
        except ControlError as error:
            ended(error)

    def _attempt(self, send: Send) -> Outcome:
        self._made += 1
        try:
            backend = self.backends.take(self._deadline, surely=self._surely)
        except ControlError as error:
            return error
        outcome: Outcome
        try:
            outcome = send(backend, self._call(backend), self._remaining_s())
        except ControlError as error:
            outcome = error
        self._conclude(backend, outcome)
        return outcome

    def _call(self, backend: ActorBackend) -> MethodCall:
        return MethodCall(self.method, self._segments, backend.handle or "")

    def _conclude(self, backend: ActorBackend, outcome: Outcome) -> None:
        """Update the state of a backend after an attempt there."""
        if isinstance(outcome, CallResult):
            if outcome.failure is not None and outcome.failure.code in _ACTOR_IS_GONE:
                self.backends.expired(backend)
            self.backends.give_back(backend)
        else:
            is_gone = isinstance(outcome, _SERVER_IS_GONE) and not _is_session_ended(outcome)
            self.backends.give_back(backend, is_out_of_reach=is_gone)

    def _worth_another(self, outcome: Outcome) -> ControlError | None:
        """The error that makes another attempt worthwhile, or None."""
        error = outcome
        if isinstance(error, CallResult):
            if error.failure is None or error.failure.code is Code.RAISED:
                return None
            error = error_of(error.failure, actor=self.backends.name, method=self.method)
        if self._made > self._retries or not may_retry(error, is_idempotent=self._is_idempotent):
            return None
        is_final = self.backends.pinned is not None and isinstance(error, HandleExpiredError | SupervisionError)
        return None if is_final else error

    def _pause(self) -> bool:
        """Wait before the next attempt; False if no time is left for one."""
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
                outcome = RpcError(f"the call failed with an unexpected error: {error!r}")
                outcome.__cause__ = error
            done(outcome)

        threading.Thread(target=work, name="rpc-attempts", daemon=True).start()


def _is_session_ended(outcome: Outcome) -> bool:
    from skipper.control.rpc.wire.channel import SessionEndedError

    return isinstance(outcome, SessionEndedError)


def may_retry(error: ControlError, *, is_idempotent: bool) -> bool:
    """Whether a call with this error may be repeated: it was certainly not delivered, or may run twice."""
    return isinstance(error, _UNDELIVERED) or (is_idempotent and isinstance(error, _UNKNOWN))


def wait_s(attempt: int) -> float:
    """How long to wait after that many attempts, 1 or more: doubled each time, reduced by a random part up to half."""
    bound = min(FIRST_WAIT_S * 2.0 ** min(attempt - 1, 16), LONGEST_WAIT_S)
    return bound * random.uniform(0.5, 1.0)
