"""`Flow`: back-pressure. A process may have a bounded number of unhandled messages at one actor; then it waits.

Every process counts, for each actor, the messages that it has sent and does not know to be handled. The actor's process
gives *credit* back as messages leave the mailbox, a batch at a time. So memory is bounded at both ends, by a limit for
each pair of a sending process and an actor. One slow actor holds up no message to others: the link itself never stops.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from skipper.control.model.errors import BackpressureError, DeadlineError
from skipper.control.model.future import Future, Promise
from skipper.control.model.settings import Settings
from skipper.control.runtime.context import current_context
from skipper.control.runtime.interfaces import Sender
from skipper.control.runtime.messages import Mail
from skipper.control.wire.messages import Call, Credit
from skipper.control.wire.process_ref import ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.loop import LoopThread
    from skipper.control.runtime.process_state import ProcessState
    from skipper.control.wire.transport import Transport

_CREDIT_MESSAGES = 64
_CREDIT_NBYTES = 4 << 20
"""Credit is given for this many messages, or bytes, at once. Both are well below the smallest possible limits, since a
sender must never wait for credit that will not come."""


class Window:
    """What one process has sent to one actor, or down one tree, and does not know to be handled."""

    __slots__ = ("_lock", "_waiting", "count", "nbytes")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Promise[None]] = []
        self.count = 0
        self.nbytes = 0

    def enter(self, nbytes: int, max_count: int, max_nbytes: int) -> Future[None] | None:
        """Count a message in, or return a future that ends when there may be room."""
        with self._lock:
            if self.count < max_count and self.nbytes < max_nbytes:
                self.count += 1
                self.nbytes += nbytes
                return None
            future: Promise[None] = Promise()
            self._waiting.append(future)
            return future

    def leave(self, count: int, nbytes: int) -> None:
        """Count messages out."""
        with self._lock:
            # A message that an actor was handling when it failed is counted as handled and as refused.
            self.count = max(self.count - count, 0)
            self.nbytes = max(self.nbytes - nbytes, 0)
        self.wake()

    def wake(self) -> None:
        """Make the waiting callers look again."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.set_result(None)


class Flow:
    """Back-pressure in one process, for both directions. Safe to use from any thread."""

    def __init__(self, state: ProcessState, loop_thread: LoopThread, transport: Transport, sender: Sender) -> None:
        self._id = state.me.id
        self._loop_thread = loop_thread
        self._transport = transport
        self._sender = sender
        self.take_over(state.settings)
        self._windows: dict[tuple[str, int], Window] = {}
        self._targets: dict[str, set[int]] = {}
        """The actors that have a window, by their process."""
        self._lock = threading.Lock()
        self._handled: dict[tuple[str, int], tuple[int, int]] = {}

    def take_over(self, settings: Settings) -> None:
        """Apply the bounds of these settings to what is sent from now on."""
        self._max_count = settings.max_unhandled
        self._max_nbytes = settings.max_unhandled_nbytes
        self._timeout_s = settings.send_timeout_s

    def admit(self, to: ProcessRef, call: Call) -> None:
        """Count a message for an actor; wait while too many messages of this process are unhandled there.

        Raises:
            BackpressureError: there was no room in time, or waiting for it could never end.
        """
        key = (to.id, call.target)
        window = self._windows.get(key) or self._new_window(key)
        payload = call.payload
        nbytes = len(payload[0]) if len(payload) == 1 else sum(map(len, payload))
        if (room := window.enter(nbytes, self._max_count, self._max_nbytes)) is None:
            return
        deadline = time.monotonic() + self._timeout_s
        while room is not None and not self._is_lost(to):
            self._wait(room, call, to.name, self._is_in_its_own_way(call, to), deadline)
            window = self._windows.get(key) or self._new_window(key)
            room = window.enter(nbytes, self._max_count, self._max_nbytes)

    def admit_cast(self, window: Window, call: Call, nbytes: int) -> None:
        """Count in a message that goes down a tree; wait while some receiver has too many of them unhandled.

        Raises:
            BackpressureError: there was no room in time, or waiting for it could never end.
        """
        if (room := window.enter(nbytes, self._max_count, self._max_nbytes)) is None:
            return
        deadline = time.monotonic() + self._timeout_s
        while room is not None:
            self._wait(room, call, "a member of the mesh", self._is_needed_here(), deadline)
            room = window.enter(nbytes, self._max_count, self._max_nbytes)

    def handled(self, mail: Mail) -> None:
        """Note that a message has left its mailbox, to be handled or refused."""
        if mail.cast is not None:
            mail.cast.relay.handled(mail.cast.number, sum(map(len, mail.message.payload)))
            return
        key = (mail.sender.id, mail.message.target)
        with self._lock:
            count, nbytes = self._handled.get(key, (0, 0))
            count, nbytes = count + 1, nbytes + sum(map(len, mail.message.payload))
            if count < _CREDIT_MESSAGES and nbytes < _CREDIT_NBYTES:
                self._handled[key] = count, nbytes
                return
            self._handled.pop(key, None)
        self._sender.send(mail.sender, Credit(mail.message.target, count, nbytes))

    def unhandled(self) -> int:
        """How many messages this process has sent directly to actors and does not know to be handled.

        Others report in batches what they have handled, so a part of these messages has been handled.
        """
        return sum(window.count for window in list(self._windows.values()))

    def credit(self, sender: ProcessRef, credit: Credit) -> None:
        """Take the credit that the process of an actor gives."""
        window = self._windows.get((sender.id, credit.target))
        if window is not None:
            window.leave(credit.messages, credit.nbytes)

    def withdraw(self, to: ProcessRef, call: Call) -> None:
        """Count out a message that was admitted and then could not be sent."""
        window = self._windows.get((to.id, call.target))
        if window is not None:
            window.leave(1, sum(map(len, call.payload)))

    def forget(self, process: ProcessRef) -> None:
        """Forget a process that is gone; callers that wait for it try to send, and then get the error."""
        with self._lock:
            targets = self._targets.pop(process.id, ())
            windows = [window for target in targets if (window := self._windows.pop((process.id, target), None))]
        for window in windows:
            window.wake()
        with self._lock:
            for key in [key for key in self._handled if key[0] == process.id]:
                del self._handled[key]

    def _new_window(self, key: tuple[str, int]) -> Window:
        with self._lock:
            self._targets.setdefault(key[0], set()).add(key[1])
            return self._windows.setdefault(key, Window())

    def _is_lost(self, to: ProcessRef) -> bool:
        link = self._transport.find(to.id)
        return link is not None and link.lost is not None

    def _wait(self, room: Future[None], call: Call, who: str, in_its_own_way: bool, deadline: float) -> None:
        where = f"{call.method}: {who} has not handled what was sent to this actor before"
        limit = f"(the limit is {self._max_count} messages or {self._max_nbytes} bytes from one process to one actor)"
        if in_its_own_way:
            raise BackpressureError(f"{where}, and will not do so while this thread waits {limit}")
        try:
            room.get(max(deadline - time.monotonic(), 0))
        except DeadlineError:
            raise BackpressureError(f"{where} within {self._timeout_s:g} s {limit}") from None

    def _is_in_its_own_way(self, call: Call, to: ProcessRef) -> bool:
        """Whether nothing can be handled while the current thread waits."""
        if self._is_needed_here():
            return True
        here = current_context.get()
        if here is None or to.id != self._id:
            return False
        return here.actor_instance.mesh_uid == call.target

    def _is_needed_here(self) -> bool:
        """Whether only the current thread can bring credit."""
        return self._loop_thread.is_current() or self._transport.is_current()
