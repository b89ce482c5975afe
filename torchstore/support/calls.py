"""Waiting for an actor's answer, which may be one of the store's own errors."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import NoReturn, TypeVar

from skipper.control import ActorError, Future
from skipper.torchstore.errors import StoreError, StoreTimeoutError
from skipper.torchstore.support.deadlines import within

T = TypeVar("T")


async def ask(call: Awaitable[T], timeout: float) -> T:
    """Wait for an actor's answer, and unwrap the store's own errors.

    Raises:
        StoreError: What the endpoint raised.
        StoreTimeoutError: No answer in time.
        SupervisionError: The actor is dead.
        ActorError: The endpoint failed otherwise.
    """
    try:
        return await within(timeout, call)
    except (TimeoutError, ActorError) as error:
        _raise_own(error, timeout)


def ask_blocking(call: Future[T], timeout: float) -> T:
    """`ask` for code without an event loop."""
    try:
        return call.get(timeout)
    except (TimeoutError, ActorError) as error:
        _raise_own(error, timeout)


def _raise_own(error: TimeoutError | ActorError, timeout: float) -> NoReturn:
    """Raise the store's own error, where there is one in or behind this."""
    if isinstance(error, TimeoutError) and not isinstance(error, StoreError):
        raise StoreTimeoutError(f"the store did not answer in {timeout:g} s") from error
    if isinstance(error, ActorError) and isinstance(error.cause, StoreError):
        raise error.cause from error
    raise error
