"""When a call may be made again, and how long to wait before it."""

from __future__ import annotations

import random

from skipper.control.model.errors import (
    AuthenticationError,
    BackpressureError,
    ConnectionLostError,
    ControlError,
    HandleExpiredError,
    NameNotFoundError,
    ResolverError,
    SupervisionError,
    UnreachableError,
)

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


def may_retry(error: ControlError, *, is_idempotent: bool) -> bool:
    """Whether a call that ended so may be made again: it was surely not delivered, or may run twice."""
    return isinstance(error, _UNDELIVERED) or (is_idempotent and isinstance(error, _UNKNOWN))


def wait_s(attempt: int) -> float:
    """How long to wait after so many attempts, 1 or more: twice as long each time, less up to a half by chance."""
    bound = min(FIRST_WAIT_S * 2.0 ** min(attempt - 1, 16), LONGEST_WAIT_S)
    return bound * random.uniform(0.5, 1.0)
