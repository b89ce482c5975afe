"""What may be sent a second time, and how often."""

from __future__ import annotations

from skipper.control.model.endpoint_spec import EndpointSpec
from skipper.control.model.errors import SupervisionError


def may_retry(spec: EndpointSpec, error: SupervisionError, attempts: int, limit: int) -> bool:
    """Whether a request that ended in ``error`` may go to another replica.

    It may if it surely was not handled, however often that happens; or if its endpoint is `idempotent`, up to a limit:
    a request that kills whoever handles it would otherwise kill all replicas, one after another.

    Args:
        spec: the endpoint that it is for.
        error: what came in place of an answer.
        attempts: how often it was sent so far.
        limit: how often it may be sent again.
    """
    return error.is_unhandled or (spec.is_idempotent and attempts <= limit)
