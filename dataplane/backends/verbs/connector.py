"""The connection to one owner, made at the first use, and again after each failure."""

import logging
import threading
import time
import weakref
from collections.abc import Callable

from skipper.dataplane.backends.verbs.card import verbs_card_of
from skipper.dataplane.backends.verbs.connection import VerbsConnection
from skipper.dataplane.backends.verbs.engine import VerbsEngine
from skipper.dataplane.backends.verbs.handshake import NOBODY, hung_up
from skipper.dataplane.errors import OwnerDiedError, TransferTimeoutError
from skipper.dataplane.handle import Card
from skipper.dataplane.identity import ProcessWatch, host_id

_LOG = logging.getLogger(__name__)

_AVOID_S = 10.0  # how long a rail without a path to the owner is left out


class OwnerConnector:
    """Connects to one owner whenever that is needed. Thread-safe.

    Attributes:
        engine: Moves the bytes.
        owner: The owner.
        card: How to reach it.
        rails: The rails that both sides have.
        present: The latest connection, which may be broken; None before the first.
    """

    def __init__(self, engine: VerbsEngine, card: Card) -> None:
        self.engine = engine
        self.owner = card.owner
        self.card = verbs_card_of(card)
        self.rails = tuple(range(min(len(engine.rails.rails), len(self.card.page_keys))))
        # Within the host the kernel knows at once; beyond it the connection's own socket shows it.
        self._watch = ProcessWatch(card.owner) if card.owner.host == host_id() else None
        self._lock = threading.Lock()
        self.present: VerbsConnection | None = None
        self._forsaken: weakref.finalize[[VerbsConnection], OwnerConnector] | None = None
        self._avoid: dict[int, float] = {}  # rails, until when

    def usable(self) -> bool:
        """Whether the owner is not known to be dead."""
        return self._watch is None or not self._watch.gone

    def close(self) -> None:
        """Cut the connection. Idempotent; the next use makes a new one."""
        with self._lock:
            if self.present is not None:
                self.engine.cut(self.present)

    def connected(self, needs: tuple[int, ...], due: Callable[[], float]) -> VerbsConnection:
        """The present connection, made if there is no working one.

        Args:
            needs: Rails that it must have.
            due: Returns the deadline, on CLOCK_MONOTONIC. It is called only if a connection has to be made.

        Raises:
            OwnerDiedError: The owner is gone.
            TransferError: No connection can be made.
            TransferTimeoutError: The deadline passed.
        """
        connection = self.present
        if connection is not None and self.good(connection, needs):
            return connection
        deadline = due()
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TransferTimeoutError(f"the deadline passed before {self.owner} had answered")
        try:
            if self.present is connection or self.present is None or not self.present.alive:
                self.present = self._connect(needs, deadline)
            return self.present
        finally:
            self._lock.release()

    def gone(self) -> bool:
        """Whether the owner is gone; waits a moment in case it is dying."""
        return self._watch is not None and self._watch.gone_soon()

    def good(self, connection: VerbsConnection, needs: tuple[int, ...]) -> bool:
        """Whether it works and has the needed rails, and no more rails should be tried now."""
        if not connection.alive or (self._watch is None and hung_up(connection.socket)):
            return False
        for rail in needs:
            if rail not in connection.queues:
                return False
        return connection.widen_at is None or time.monotonic() < connection.widen_at or not connection.idle

    def _connect(self, needed: tuple[int, ...], deadline: float) -> VerbsConnection:
        if not self.usable():
            raise OwnerDiedError(f"{self.owner} is gone")
        failed, replaced = (None, NOBODY) if self.present is None else (self.present.failed_rail, self.present.name)
        if self._forsaken is not None:
            self._forsaken()
        now = time.monotonic()
        if failed is not None and len(self.rails) > 1:
            self._avoid[failed] = now + _AVOID_S
            _LOG.warning(
                "%s does not reach %s; using the other ports for %d s",
                self.engine.rails.devices[failed].port,
                self.owner,
                _AVOID_S,
            )
        self._avoid = {rail: until for rail, until in self._avoid.items() if until > now and rail not in needed}
        # If none is left, all of them: then the caller gets the device's error for them.
        wanted = tuple(rail for rail in self.rails if self._promising(rail)) or self.rails
        connection = self.engine.connect(self.card.address, self.card.token, wanted, deadline, replaces=replaced)
        if len(wanted) < len(self.rails):
            connection.widen_at = min(self._avoid.values(), default=now + _AVOID_S)
        self._forsaken = weakref.finalize(self, self.engine.cut, connection)
        self._forsaken.atexit = False
        return connection

    def _promising(self, rail: int) -> bool:
        return rail not in self._avoid and (len(self.rails) == 1 or self.engine.rails.devices[rail].port.active)
