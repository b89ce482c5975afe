"""`ActorTable`: the actors of this process by number; it also answers messages for actors that are not there."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from skipper.control.model.failure import MeshFailure
from skipper.control.model.future import Future
from skipper.control.runtime.actor_state import ActorState
from skipper.control.runtime.messages import ROOT_UID, Mail
from skipper.control.runtime.replies import refuse
from skipper.control.runtime.requests import ACTIVITY, BEGINS, READY, STOP_ACTOR, WATCH
from skipper.control.runtime.stops import Stops
from skipper.control.wire.messages import Call, ProcessRequest

if TYPE_CHECKING:
    from skipper.control.runtime.begin_log import BeginAddress
    from skipper.control.runtime.flow_control import Flow
    from skipper.control.runtime.interfaces import Replier
    from skipper.control.runtime.process_state import ProcessState
    from skipper.control.runtime.request_server import RequestServer

SPAWN_GRACE_S = 10.0
"""How long messages are kept for an actor that is not spawned yet. A third process can get a reference, and its call
can arrive before the spawner's message."""

_LATE_S = 1.0
"""A timer that fires this much too late shows that the process was stopped, or had no CPU time."""

_TOMBSTONES = 4096


class ActorTable:
    """Actors that live, that are winding up, and that are gone; safe to use from any thread.

    Attributes:
        stops: keeps the bounds of actors that end.
    """

    def __init__(
        self,
        state: ProcessState,
        loop: asyncio.AbstractEventLoop,
        flow: Flow,
        replier: Replier,
        requests: RequestServer,
    ) -> None:
        self.stops = Stops(state, loop, self.ending)
        self._state = state
        self._loop = loop
        self._flow = flow
        self._replier = replier
        self._requests = requests
        self._lock = threading.Lock()
        self._live: dict[int, ActorState] = {}
        self._ending: dict[int, ActorState] = {}
        self._gone: OrderedDict[int, tuple[str, MeshFailure | None]] = OrderedDict()
        self._early: dict[int, list[Mail]] = {}
        requests.serve(STOP_ACTOR, self._asked_to_stop)
        requests.serve(READY, self._tell_when_ready)
        requests.serve(WATCH, self._tell_when_over)
        requests.serve(ACTIVITY, self._tell_activity)
        requests.serve(BEGINS, self._tell_begins)

    def __len__(self) -> int:
        return len(self._live)

    def live(self) -> list[ActorState]:
        """The actors that take messages, oldest first."""
        return list(self._live.values())

    def ending(self) -> list[ActorState]:
        """The actors that take no more messages: stopped or failed, and not buried."""
        return list(self._ending.values())

    def get(self, uid: int) -> ActorState | None:
        """A live actor."""
        return self._live.get(uid)

    def find(self, uid: int) -> ActorState | None:
        """An actor that lives or is winding up."""
        return self._live.get(uid) or self._ending.get(uid)

    def add(self, actor: ActorState) -> None:
        """Let an actor take messages, beginning with those that came early."""
        with self._lock:
            early = self._early.pop(actor.uid, [])
            for mail in early:
                if isinstance(mail.message, Call):
                    actor.executor.submit(mail)
            self._live[actor.uid] = actor
        for mail in early:
            if isinstance(mail.message, ProcessRequest):
                self._requests.handle(mail.sender, mail.message)

    def deliver(self, mail: Mail) -> None:
        """Bring a message to its actor, or answer it."""
        actor = self._live.get(mail.message.target)
        if actor is not None:
            actor.executor.submit(mail)
        else:
            self._deliver_to_absent(mail)

    def end(self, actor: ActorState, failure: MeshFailure | None = None) -> bool:
        """Let an actor take no more messages; False if it has ended or failed before."""
        with self._lock:
            was_live = self._live.pop(actor.uid, None) is not None
            fails_while_ending = failure is not None and actor.failure is None and actor.uid in self._ending
            if not (was_live or fails_while_ending):
                return False
            self._ending[actor.uid] = actor
            actor.end_with(failure)
            return True

    def stop(self, uid: int, timeout: float) -> Future[None]:
        """Stop an actor in good order, and by force after ``timeout`` seconds (see `Stops`).

        Returns:
            A future that ends with the actor, at once if the actor is gone already; with a `StopTimeoutError` if the
            actor was cut short.
        """
        actor = self._live.get(uid)
        is_first = actor is not None and self.end(actor)
        ending = self._ending.get(uid)
        if ending is None:
            return Future.of(None)
        self.stops.within(ending, timeout)
        if is_first:
            ending.executor.stop()
        return ending.ended

    def forget(self, actor: ActorState) -> None:
        """Bury an actor that has wound up; its tombstone answers for it."""
        with self._lock:
            self._live.pop(actor.uid, None)
            self._ending.pop(actor.uid, None)
            self._gone[actor.uid] = (actor.end_reason(), actor.failure)
            while len(self._gone) > _TOMBSTONES:
                self._gone.popitem(last=False)

    def _deliver_to_absent(self, mail: Mail) -> None:
        uid = mail.message.target
        with self._lock:
            actor = self._live.get(uid)
            ending = self._ending.get(uid)
            gone = self._gone.get(uid)
            if not (actor or ending or gone):
                early = self._early.setdefault(uid, [])
                early.append(mail)
                if len(early) == 1:
                    self._loop.call_soon_threadsafe(self._give_up_later, uid)
                return
        if actor is not None and isinstance(mail.message, ProcessRequest):
            self._requests.handle(mail.sender, mail.message)  # it has just been spawned
        elif actor is not None:
            actor.executor.submit(mail)
        elif ending is not None:
            ending.answer_dead(mail)
        elif gone is not None:
            refuse(self._flow, self._replier, mail, *gone)

    # On the loop thread

    def _give_up_later(self, uid: int) -> None:
        self._loop.call_later(SPAWN_GRACE_S, self._give_up_on, uid, self._loop.time() + SPAWN_GRACE_S)

    def _give_up_on(self, uid: int, due_s: float) -> None:
        if self._loop.time() - due_s > _LATE_S:
            self._give_up_later(uid)  # the spawner's message may have arrived by now, and not be read yet
            return
        with self._lock:
            early = self._early.pop(uid, [])
        for mail in early:
            reason = f"there is no such actor in process {self._state.me.name}"
            refuse(self._flow, self._replier, mail, reason, None)

    # Requests to this process

    def _asked_to_stop(self, mail: Mail, timeout: float) -> Future[None]:
        return self.stop(mail.message.target, timeout)

    def _tell_when_ready(self, mail: Mail, _: None) -> None:
        actor = self._find_or_answer(mail)
        if actor is None:
            return

        def settled(ready: Future[None]) -> None:
            if actor.has_failed():
                actor.answer_dead(mail)
            else:
                self._requests.answer(mail, ready)

        actor.ready.add_done_callback(settled)

    def _tell_when_over(self, mail: Mail, _: None) -> Future[MeshFailure | None] | None:
        # The script, and a process as a whole, end with this process, and the loss of its link is the answer.
        if mail.message.target in (ROOT_UID, self._state.uid) and self.find(mail.message.target) is None:
            return None
        actor = self._find_or_answer(mail)
        return None if actor is None else actor.over

    def _tell_activity(self, mail: Mail, _: None) -> Future[str]:
        """Say what an actor does; for the actor 0, say that the process answers."""
        if mail.message.target == 0:
            return Future.of("its process answers by now")
        actor = self.find(mail.message.target)
        gone = "there is no such actor in its process, or it has ended"
        return Future.of(gone if actor is None else actor.activity())

    def _tell_begins(self, mail: Mail, _: None) -> Future[BeginAddress] | None:
        actor = self._find_or_answer(mail)
        return None if actor is None else Future.of(actor.log_begins())

    def _find_or_answer(self, mail: Mail) -> ActorState | None:
        """The actor that a request is about; None if the request has been answered for it, or will be."""
        actor = self.find(mail.message.target)
        if actor is None:
            self._deliver_to_absent(mail)
        return actor
