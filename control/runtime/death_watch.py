"""`watch`, which tells when an actor ends, and `DeathWatch`: the actors whose lives a port depends on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from skipper.control.model.errors import LinkError, SupervisionError
from skipper.control.model.failure import MeshFailure
from skipper.control.model.future import Future, Promise, peek
from skipper.control.runtime.interfaces import Caller
from skipper.control.runtime.messages import ActorRef
from skipper.control.runtime.ports import Awaited, OneReply
from skipper.control.runtime.requests import WATCH

_Key = tuple[str, int]


def watch(caller: Caller, actor: ActorRef) -> Future[MeshFailure | None]:
    """Wait for the end of an actor anywhere in the job: its failure, or None when it was stopped.

    It is told by the actor's process, or by the end of that: nothing is polled.
    """
    answer: Promise[MeshFailure | None] = Promise()
    awaited = Awaited(actor.process, str(actor), WATCH.name, actor, request=WATCH)
    port = caller.ports.open(OneReply(answer, awaited))
    caller.send(actor.process, WATCH.envelope(None, target=actor.uid, port=port))
    ended: Promise[MeshFailure | None] = Promise()

    def outcome() -> MeshFailure | None:
        try:
            return peek(answer)
        except SupervisionError as error:
            return error.failure  # the actor was dead before, or its process is

    answer.add_done_callback(lambda _: ended.settle_by(outcome))
    return ended


class DeathWatch:
    """The actors that a port is linked to. Safe to use from any thread.

    Args:
        caller: asks the processes of the actors.
        on_dead: told, perhaps several times, once all of them have ended.
    """

    def __init__(self, caller: Caller, on_dead: Callable[[LinkError], object]) -> None:
        self._caller = caller
        self._on_dead = on_dead
        self._lock = threading.Lock()
        self._alive: dict[_Key, ActorRef] = {}
        self._dead: dict[_Key, tuple[ActorRef, MeshFailure | None]] = {}

    def change(self, add: Iterable[ActorRef], remove: Iterable[ActorRef]) -> None:
        """Link some actors and unlink others, as one step."""
        added: list[ActorRef] = []
        with self._lock:
            for actor in add:
                key = (actor.process.id, actor.uid)
                if key not in self._alive and key not in self._dead:
                    self._alive[key] = actor
                    added.append(actor)
            for actor in remove:
                self._alive.pop((actor.process.id, actor.uid), None)
                self._dead.pop((actor.process.id, actor.uid), None)
        for actor in added:
            watch(self._caller, actor).add_done_callback(lambda ended, actor=actor: self._ended(actor, ended))  # type: ignore[misc]
        self._tell()

    def error(self) -> LinkError | None:
        """What a receiver is told: an error once every linked actor is dead; None before, and without any links."""
        with self._lock:
            if self._alive or not self._dead:
                return None
            ends = list(self._dead.values())
        reasons = [failure.root_cause().message if failure else f"{actor} has stopped" for actor, failure in ends]
        first = next((failure for _, failure in ends if failure is not None), None)
        return LinkError(
            f"nothing more will come: every actor linked to this port is dead: {'; '.join(reasons)}", first
        )

    def _ended(self, actor: ActorRef, ended: Future[Any]) -> None:
        key = (actor.process.id, actor.uid)
        with self._lock:
            if self._alive.pop(key, None) is None:
                return  # it has been unlinked
            self._dead[key] = (actor, ended.get(0))
        self._tell()

    def _tell(self) -> None:
        if (error := self.error()) is not None:
            self._on_dead(error)
