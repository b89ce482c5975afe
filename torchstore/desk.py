"""Where a client finds the controller of its store: always the same one, or, of a store with a journal, the latest."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from threading import Lock, Thread
from typing import Any, TypeVar

from control import ActorError, ActorMesh, ControlError, Future, SupervisionError
from control.bounds import check_seconds
from torchstore.controller import StoreController
from torchstore.deadlines import within
from torchstore.errors import StoreError, StoreTimeoutError
from torchstore.held import held_of
from torchstore.messages import StoreInfo

_log = logging.getLogger("torchstore")

T = TypeVar("T")

Call = Callable[[ActorMesh[StoreController]], Future[T]]
"""Sends a message to a controller."""

_RETURN_TIMEOUT_S = 60.0
_GRACE_S = 1.0
_PAUSE_S = 0.02  # between two attempts to reach a controller that is said to be there


class Desk:
    """The controller of one store, for one client. Thread-safe.

    Args:
        store_name: Of the store.
        entrance: The actor that is found by that name.
        info: What that has said of the store.

    Attributes:
        actor: The controller that is there now, as far as is known.
        may_change: Whether another one takes its place when it dies.
    """

    def __init__(self, store_name: str, entrance: ActorMesh[StoreController], info: StoreInfo) -> None:
        self._entrance = entrance
        self._client = info.client
        self._held = held_of(store_name)
        self._lock = Lock()
        self._turning = Lock()
        self.may_change = info.successor is not None
        self._life = info.successor.life if info.successor is not None else 0
        self.actor = info.successor.actor if info.successor is not None else entrance

    async def ask(self, call: Call[T], timeout: float, *, grants: bool = False) -> T:
        """The controller's answer; where it dies meanwhile, that of the next one.

        Args:
            call: Sends the message: again, if its controller has died.
            timeout: In seconds.
            grants: Whether the answer may be a lease.

        Raises:
            StoreError: What the endpoint raised.
            StoreTimeoutError: No answer in time.
            SupervisionError: The controller is dead, and there is no other.
            ActorError: The endpoint failed otherwise.
        """
        if not self.may_change:
            return await ask(call(self.actor), timeout)
        end = time.monotonic() + check_seconds("timeout", timeout)
        while True:
            with self._lock:
                life, actor = self._life, self.actor
            try:
                answer = call(actor)
                if grants:
                    self._held.expect(answer, life)
                return await ask(answer, max(end - time.monotonic(), 0.001))
            except SupervisionError:
                left = end - time.monotonic()
                if left <= 0:
                    raise StoreTimeoutError(f"the store's controller has died, and {timeout:g} s are over") from None
                await asyncio.to_thread(self._turn_to_successor, life, left)
                await asyncio.sleep(_PAUSE_S)

    def give_back(self, leases: Iterable[tuple[str, int]], batch: int, call: Call[Any]) -> None:
        """Give leases back by a message, without waiting. A controller that dies before it is heard is no obstacle."""
        if not self.may_change:
            call(self.actor)
            return
        self._held.give_back(leases, batch)
        with self._lock:
            life, actor = self._life, self.actor
        context = contextvars.copy_context()

        def look(sent: Future[Any]) -> None:
            try:
                sent.get(0)
            except (SupervisionError, TimeoutError):
                # Or an idle process would keep what nobody reads until it asks for something else.
                work = lambda: self._turn_quietly(life)  # noqa: E731
                Thread(target=context.run, args=(work,), name="torchstore-return", daemon=True).start()
            except ControlError:
                pass

        call(actor).add_done_callback(look)

    def _turn_quietly(self, life: int) -> None:
        try:
            self._turn_to_successor(life, _RETURN_TIMEOUT_S)
        except (StoreError, ControlError, TimeoutError) as error:
            _log.info("the store's controller is gone: %s", error)

    def _turn_to_successor(self, life: int, timeout: float) -> None:
        """Find the controller after one that is dead, and tell it what this process reads; blocks.

        Raises:
            StoreError: There will be none, or none in time; or the store was shut down.
            SupervisionError: The script is gone.
        """
        end = time.monotonic() + timeout
        with self._turning:
            if self._life > life:
                return  # somebody was faster
            successor = _unwrapped(self._entrance.successor.call_one(life, timeout), timeout + _GRACE_S)
            if successor.life == life:
                return  # it was only not to be reached
            try:
                leases, batches = self._held.after(life, max(end - time.monotonic(), 0.0))
            except TimeoutError as error:
                raise StoreTimeoutError(str(error)) from error
            left = max(end - time.monotonic(), 0.001)
            with suppress(SupervisionError):  # dead again: who asks it next turns to the one after it
                _unwrapped(successor.actor.return_to.call_one(self._client, leases, batches), left)
            with self._lock:
                self.actor, self._life = successor.actor, successor.life
            gone, gone_batches = self._held.without(leases, batches)
        if gone:
            successor.actor.release.call(tuple(gone), 0)
        for batch in gone_batches:
            successor.actor.release.call((), batch)


def _unwrapped(call: Future[T], timeout: float) -> T:
    """`ask`, blocking."""
    try:
        return call.get(timeout)
    except TimeoutError as error:
        raise StoreTimeoutError(f"the store did not answer in {timeout:g} s") from error
    except ActorError as error:
        if isinstance(error.cause, StoreError):
            raise error.cause from error
        raise


async def ask(call: Awaitable[T], timeout: float) -> T:
    """Wait for an actor's answer and unwrap the store's own errors.

    Raises:
        StoreError: What the endpoint raised.
        StoreTimeoutError: No answer in time.
        SupervisionError: The actor is dead.
        ActorError: The endpoint failed otherwise.
    """
    try:
        return await within(timeout, call)
    except TimeoutError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreTimeoutError(f"the store did not answer in {timeout:g} s") from error
    except ActorError as error:
        if isinstance(error.cause, StoreError):
            raise error.cause from error
        raise
