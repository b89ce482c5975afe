"""`SharedExecutor`: an actor without a thread of its own. One `ActorThread` runs many actors, one message at a time."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from typing import TYPE_CHECKING

from skipper.control.model.errors import ActorDefinitionError
from skipper.control.model.future import Gate
from skipper.control.runtime.actor_state import ActorEndedError
from skipper.control.runtime.context import current_context
from skipper.control.runtime.executor import Executor, NewExecutor, drive
from skipper.control.runtime.messages import Mail
from skipper.control.runtime.procs import thread_limit

if TYPE_CHECKING:
    from skipper.control.runtime.actor_state import ActorState


class ActorThread:
    """The thread of many actors. While it is idle it reads for the process, like the thread of an idle actor."""

    def __init__(self, name: str) -> None:
        self._due: deque[SharedExecutor] = deque()
        """The queue of turns: an actor is in it once for each of its messages."""
        self._idle = Gate()
        self._is_over = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread_limit.start(self.thread)

    def executor_for(self, *, is_async: bool) -> NewExecutor:
        """A function that makes an executor on this thread."""
        return lambda actor: SharedExecutor(actor, self, is_async=is_async)

    def put(self, executor: SharedExecutor) -> None:
        """Give an actor a turn; from any thread."""
        self._due.append(executor)
        if not self._idle.is_open:  # the thread closes it before it looks at what is due
            self._idle.open()

    def close(self, timeout: float) -> None:
        """End the thread after its present work; actors that have not ended stay as they are."""
        self._is_over = True
        self._idle.open()
        self.thread.join(timeout)

    def _run(self) -> None:
        while not self._is_over:
            try:
                executor = self._due.popleft()
            except IndexError:
                self._idle.wait(takes_all=True)
            else:
                executor.take_turn()


class SharedExecutor(Executor):
    """Runs a sync actor on a shared thread. Its endpoints must not wait for anything: all others would wait, too.

    Args:
        actor: the actor that it runs.
        thread: the shared thread.
        is_async: whether the actor has ``async`` endpoints, which it does not run.
    """

    def __init__(self, actor: ActorState, thread: ActorThread, *, is_async: bool) -> None:
        self._shared = thread
        super().__init__(actor)
        self._is_async = is_async
        self._mails: deque[Mail] = deque()
        self._is_begun = False
        self._is_stopped = False
        self._ended = False

    def _make_thread(self) -> threading.Thread:
        return self._shared.thread

    def start(self) -> None:
        """Construct the actor when its turn comes.

        Raises:
            ActorDefinitionError: it has ``async`` endpoints.
        """
        if self._is_async:
            raise ActorDefinitionError("actors that share a thread have no async endpoints")
        self._shared.put(self)

    def submit(self, mail: Mail) -> None:
        """Queue a message."""
        self._mails.append(mail)
        self._shared.put(self)

    def depth(self) -> int:
        """How many messages are queued."""
        return len(self._mails)

    def stop(self) -> None:
        """End behind what is queued."""
        self._is_stopped = True
        self._shared.put(self)

    def wake(self) -> None:
        """Handle failures when its turn comes."""
        self._shared.put(self)

    def unwind(self) -> None:
        """End when its turn comes."""
        self._shared.put(self)

    def interrupt(self) -> bool:
        """True: nothing is interrupted on a thread that others need."""
        return True

    def stack(self) -> list[traceback.FrameSummary]:
        """Empty: the thread may be running another actor."""
        return []

    def drain(self) -> None:
        """Answer what is queued."""
        while True:
            try:
                mail = self._mails.popleft()
            except IndexError:
                return
            self._actor.answer_dead(mail)

    def take_turn(self) -> None:
        """Construct the actor, or handle its next message, or end it. On the shared thread."""
        try:
            self._run()
        except ActorEndedError:
            self._actor.bury()
        except BaseException as error:  # noqa: BLE001  (a defect of this package must not leave callers waiting)
            self._break(error)
            self._actor.bury()

    def _run(self) -> None:
        actor = self._actor
        if self._ended or self._is_async:
            self.drain()
            return
        if not self._is_begun:
            self._is_begun = True
            current_context.set(actor.context)
            drive(actor.construct(is_async=False))
        elif self._mails and not actor.is_cut_off:
            drive(actor.handle(self._mails.popleft()))
        if actor.failures and not actor.is_cut_off:
            current_context.set(actor.context)
            drive(actor.supervise(is_async=False))
        if actor.is_cut_off or (self._is_stopped and not self._mails):
            self._ended = True
            self.drain()
            current_context.set(actor.context)
            drive(actor.wind_up(is_async=False))
