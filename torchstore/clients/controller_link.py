"""How a client finds the controller of its store. A store with a journal has several, one after the other."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from threading import Condition, Lock, Thread
from typing import Any, TypeVar

from skipper.control import ControlError, Future, SupervisionError
from skipper.control.model.bounds import check_seconds
from skipper.torchstore.errors import StoreError, StoreTimeoutError
from skipper.torchstore.protocol.batches import BatchGrant
from skipper.torchstore.protocol.messages import CLIENTS_BITS, Controller, Grant, StoreInfo
from skipper.torchstore.support.deadlines import ask, ask_blocking, within

_log = logging.getLogger("skipper.torchstore")

T = TypeVar("T")

Call = Callable[[Controller], Future[T]]
"""Sends a message to a controller."""

_Switch = concurrent.futures.Future[None]

_SWITCH_TIMEOUT_S = 60.0
_GRACE_S = 1.0
_PAUSE_S = 0.02  # between two attempts to reach a controller that should be there


class HeldLeases:
    """The leases of one process on versions of one store; a controller that follows a dead one gets them.

    Thread-safe. That controller returns every other lease: its release was sent but not received, or its grant did not
    arrive.
    """

    def __init__(self) -> None:
        self._leases: set[tuple[str, int]] = set()
        self._batches: set[int] = set()
        self._awaited: dict[Future[Any], int] = {}  # answers in flight, and of which controller
        self._changed = Condition()

    def expect(self, answer: Future[Any], life: int) -> None:
        """An answer of the controller with the number ``life`` may grant something."""
        with self._changed:
            self._awaited[answer] = life
        answer.add_done_callback(self.take)

    def take(self, answer: Future[Any]) -> None:
        """An expected answer has come. Called by each thread that sees it; only the first call counts."""
        granted: Any = ()
        with suppress(Exception):  # nothing was granted
            granted = answer.get(0)
        with self._changed:
            if self._awaited.pop(answer, None) is None:
                return
            if isinstance(granted, BatchGrant):
                self._batches.add(granted.lease)
                self._leases.update(leases_of(granted.others.values()))
            else:
                grants = granted if isinstance(granted, tuple) else (granted,)
                self._leases.update(leases_of(grant for grant in grants if isinstance(grant, Grant)))
            self._changed.notify_all()

    def give_back(self, leases: Iterable[tuple[str, int]], batch: int = 0) -> None:
        """Forget leases that are no longer needed."""
        with self._changed:
            self._leases.difference_update(leases)
            self._batches.discard(batch)

    def after(self, life: int, timeout: float) -> tuple[frozenset[tuple[str, int]], frozenset[int]]:
        """The leases that are held, with all that came from controllers up to this one; blocks until it has come.

        Raises:
            TimeoutError: It has not come.
        """
        end = time.monotonic() + timeout
        with self._changed:
            while any(number <= life for number in self._awaited.values()):
                if not self._changed.wait(max(end - time.monotonic(), 0.0)):
                    raise TimeoutError(
                        f"the store's controller was lost, and has not answered all requests after {timeout:.3g} s"
                    )
            return frozenset(self._leases), frozenset(self._batches - {0})

    def without(
        self, leases: frozenset[tuple[str, int]], batches: frozenset[int]
    ) -> tuple[frozenset[tuple[str, int]], frozenset[int]]:
        """Those of these leases that have been returned."""
        with self._changed:
            return leases - self._leases, batches - self._batches


def leases_of(grants: Iterable[Grant]) -> tuple[tuple[str, int], ...]:
    """The leases of grants, by key and number."""
    return tuple((one.key, one.lease) for grant in grants for one in (grant, *grant.singles) if one.lease)


_held: dict[str, tuple[int, HeldLeases]] = {}


def held_of(store_name: str, client: int) -> HeldLeases:
    """The leases of this process in the store that gave this client its number; those of earlier stores are dropped."""
    store = client >> CLIENTS_BITS
    found = _held.get(store_name)
    if found is None or found[0] != store:
        found = _held[store_name] = store, HeldLeases()
    return found[1]


class ControllerLink:
    """The controller of one store, for one client. Thread-safe.

    Attributes:
        actor: The controller that is there now, as far as is known.
        may_change: Whether another one replaces it when it dies.
    """

    def __init__(self, store_name: str, entrance: Controller, info: StoreInfo) -> None:
        self._entrance = entrance
        self._client = info.client
        self._held = held_of(store_name, info.client)
        self._lock = Lock()
        self._switching: _Switch | None = None
        self.may_change = info.successor is not None
        self._life = info.successor.life if info.successor is not None else 0
        self.actor = info.successor.actor if info.successor is not None else entrance

    async def ask(self, call: Call[T], timeout: float, *, grants: bool = False) -> T:
        """The answer of a controller that may change; if it dies in the meantime, that of the next one.

        Raises:
            StoreError: What the endpoint raised.
            StoreTimeoutError: No answer in time.
            SupervisionError: The controller is dead, and there is no other.
            ActorError: The endpoint failed otherwise.
        """
        end = time.monotonic() + check_seconds("timeout", timeout)
        while True:
            life, actor = self._now()
            try:
                answer = call(actor)
                if not grants:
                    return await ask(answer, max(end - time.monotonic(), 0.001))
                self._held.expect(answer, life)
                granted = await ask(answer, max(end - time.monotonic(), 0.001))
            except SupervisionError:
                await self._follow(life, timeout, end)
            except (asyncio.CancelledError, StoreTimeoutError):
                if grants:
                    answer.add_done_callback(partial(self._switch_if_lost, life))
                raise
            else:
                self._held.take(answer)  # before any thread can return it
                return granted

    async def _follow(self, life: int, timeout: float, end: float) -> None:
        """Wait until there is a controller after one that is dead.

        Raises:
            StoreError: There will be none, or the store was shut down.
            StoreTimeoutError: There was none in time.
        """
        try:
            await within(max(end - time.monotonic(), 0.001), asyncio.wrap_future(self._begin_switch(life)))
        except TimeoutError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreTimeoutError(
                f"the store's controller has died, and no other one answered within {timeout:g} s"
            ) from error
        await asyncio.sleep(_PAUSE_S)

    def give_back(self, leases: Iterable[tuple[str, int]], batch: int, call: Call[Any]) -> None:
        """Return leases by a message, without waiting; send it again if its controller dies."""
        if not self.may_change:
            call(self.actor)
            return
        leases = tuple(leases)
        self._held.give_back(leases, batch)
        self._send(call, lambda to: to.release.call(leases, batch))

    def _send(self, call: Call[Any], again: Call[Any]) -> None:
        """Send something without waiting; ``again`` to the next controller, and so on, if this one dies."""
        life, actor = self._now()

        def look(sent: Future[Any]) -> None:
            try:
                sent.get(0)
            except (SupervisionError, TimeoutError):
                self._begin_switch(life).add_done_callback(follow)
            except ControlError as error:
                _log.warning("a lease could not be returned: %s", error)

        def follow(switched: _Switch) -> None:
            error = switched.exception()
            if error is not None:
                _log.info("the store's controller is gone: %s", error)
            elif self._now()[0] > life:
                self._send(again, again)
            else:  # it was only temporarily unreachable, or this process has lost it, and so it this process
                again(actor)

        call(actor).add_done_callback(look)

    def _switch_if_lost(self, life: int, answer: Future[Any]) -> None:
        """Find the next controller for an answer that nobody waits for: the dead one may have granted something."""
        if isinstance(answer.exception(0), SupervisionError):
            self._begin_switch(life)

    def _now(self) -> tuple[int, Controller]:
        with self._lock:
            return self._life, self.actor

    def _begin_switch(self, life: int) -> _Switch:
        """Start to look for the controller after one that is dead, unless a thread already does."""
        switch = _Switch()
        switch.set_running_or_notify_cancel()  # a waiter that is cancelled does not end it for the others
        with self._lock:
            if self._switching is not None:
                return self._switching
            if self._life > life:
                switch.set_result(None)
                return switch
            self._switching = switch
        run = contextvars.copy_context().run
        thread = Thread(target=run, args=(self._switch, life, switch), name="torchstore-switch", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._end_switch(
                switch, StoreError(f"no thread can be started to look for the store's controller: {error}")
            )
        return switch

    def _switch(self, life: int, switch: _Switch) -> None:
        try:
            self._switch_to_successor(life, _SWITCH_TIMEOUT_S)
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            self._end_switch(switch, error)
        else:
            self._end_switch(switch, None)

    def _end_switch(self, switch: _Switch, error: BaseException | None) -> None:
        with self._lock:
            self._switching = None
        if error is None:
            switch.set_result(None)
        else:
            switch.set_exception(error)

    def _switch_to_successor(self, life: int, timeout: float) -> None:
        """Find the controller after one that is dead, and tell it what this process reads; blocks.

        Raises:
            StoreError: There will be none, or none in time; or the store was shut down.
            SupervisionError: The script is gone.
        """
        end = time.monotonic() + timeout
        successor = ask_blocking(self._entrance.successor.call_one(life, timeout), timeout + _GRACE_S)
        if successor.life == life:
            return  # it was only temporarily unreachable
        try:
            leases, batches = self._held.after(life, max(end - time.monotonic(), 0.0))
        except TimeoutError as error:
            raise StoreTimeoutError(str(error)) from error
        left = max(end - time.monotonic(), 0.001)
        is_there = False
        with suppress(SupervisionError):
            ask_blocking(successor.actor.return_to.call_one(self._client, leases, batches), left)
            is_there = True
        with self._lock:
            self.actor, self._life = successor.actor, successor.life
        if not is_there:  # dead again, and nobody may ask for a while
            self._switch_to_successor(successor.life, max(end - time.monotonic(), 0.001))
            return
        gone, gone_batches = self._held.without(leases, batches)
        if gone:
            successor.actor.release.call(tuple(gone), 0)
        for batch in gone_batches:
            successor.actor.release.call((), batch)
