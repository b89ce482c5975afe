"""Controllers of a store with a journal: one after the other, each in a process of its own.

The actor that is found by the store's name starts the volumes, keeps the memory of the journal, and starts a controller
that reads and writes it, and a spare one, which has imported all that it needs. When the controller dies the spare one
reads on where that has ended, and there is another spare one soon. Clients ask here for the one that is there now, at
first and whenever they have lost theirs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from control import ActorError, ActorMesh, ControlError, ProcMesh, SupervisionError, this_host
from control.failure import MeshFailure
from control.recovery.policy import Action, Attempt, RecoveryPolicy, Restart
from control.runtime import job as runtime
from torchstore.errors import ControllerLostError, StoreError, StoreTimeoutError
from torchstore.journal import JournalMemory
from torchstore.messages import Settings, StoreInfo
from torchstore.process import ProcessId
from torchstore.volumes import Volumes

if TYPE_CHECKING:
    from torchstore.controller import StoreController

_log = logging.getLogger("torchstore")

_POLICY = RecoveryPolicy(Restart(attempts=60, within_s=60.0, backoff_s=0.0))
_START_TIMEOUT_S = 60.0
_STILL_THERE_S = 2.0


@dataclass(frozen=True, slots=True)
class Successor:
    """A controller that is there.

    Attributes:
        life: Its number, above those of the controllers before it.
        actor: The controller itself.
        process: In which it lives.
    """

    life: int
    actor: ActorMesh[StoreController]
    process: ProcessId


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A process with a controller that may be on its way up, and works for nobody yet, or did."""

    life: int
    name: str
    procs: ProcMesh
    actor: ActorMesh[StoreController]

    @staticmethod
    def start(name: str, store_name: str, life: int) -> _Candidate:
        from torchstore.controller import StoreController

        own = f"{name}.{life}"
        procs = this_host().spawn_procs(per_host={"gpus": 1}, name=own)
        return _Candidate(life, own, procs, procs.spawn(own, StoreController, store_name))

    async def end(self, reason: str) -> None:
        """End it by a kill, since one that is frozen would not stop by being asked to."""
        runtime.current().hosting.kill_mesh(self.procs.uid, self.procs.root_members, f"was killed: {reason}")
        with suppress(ControlError):
            await self.procs.stop()


class Succession:
    """The controllers of one store. For an async actor, which passes failures on.

    Args:
        store_name: Names their processes.
        volumes: Of the store.
        settings: Of the store.
        lives: Numbers its controllers, above those of the stores of this name before it.

    Raises:
        JournalError: There is no memory for the journal.
    """

    def __init__(self, store_name: str, volumes: Volumes, settings: Settings, lives: Iterator[int]) -> None:
        self._store_name = store_name
        self._name = f"torchstore-{store_name}-controller"
        self._volumes = volumes
        self._settings = settings
        self._memory = JournalMemory()
        self._lives = lives
        self._history: list[Attempt] = []
        self._why_lost = ""
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._now: Successor | None = None
        self._acting = self._start()
        self._spare = self._start()
        self._run(self._bring_up(self._acting))

    @staticmethod
    async def begin(store_name: str, volumes: Volumes, settings: Settings, lives: Iterator[int]) -> Succession:
        """Start the first controller.

        Raises:
            JournalError: There is no memory for the journal.
            ControllerLostError: It could not be started.
        """
        succession = Succession(store_name, volumes, settings, lives)
        try:
            await succession.after(-1, _START_TIMEOUT_S)
        except BaseException:
            await succession.end()
            raise
        return succession

    async def after(self, life: int, timeout: float) -> Successor:
        """The controller that comes after one, or that one itself where it is still there after a while.

        Raises:
            ControllerLostError: There will be none.
            StoreTimeoutError: There was none in time.
        """
        begin = time.monotonic()
        while True:
            if self._why_lost:
                raise ControllerLostError(self._why_lost)
            waited_s = time.monotonic() - begin
            if self._now is not None and (self._now.life > life or waited_s >= _STILL_THERE_S):
                return self._now
            if waited_s >= timeout:
                raise StoreTimeoutError(f"after {timeout:.3g} s: no controller has taken the place of the one before")
            left = [timeout - waited_s, *([_STILL_THERE_S - waited_s] if self._now is not None else [])]
            await self._change(min(left))

    async def welcome(self, process: ProcessId, procs: ProcMesh) -> StoreInfo:
        """Welcome a client of the store.

        Raises:
            ControllerLostError: The store is lost.
            StoreTimeoutError: No controller was there in time.
        """
        life, end = -1, time.monotonic() + _START_TIMEOUT_S
        while True:
            successor = await self.after(life, max(end - time.monotonic(), 0.0))
            try:
                info = await successor.actor.info.call_one(process, procs)
            except SupervisionError:
                life = successor.life
            else:
                return replace(info, successor=successor)

    def supervise(self, failure: MeshFailure) -> None:
        """Put the spare controller in the place of one that has failed. Other failures are none of this."""
        if self._why_lost or failure.mesh_name not in (self._acting.name, self._spare.name):
            return
        now_s, message = time.monotonic(), failure.root_cause().message
        self._history = _POLICY.remembered(self._history, now_s)
        decision = _POLICY.decide(failure, self._history, now_s)
        self._history.append(Attempt(decision.action, now_s))
        _log.warning("%s: %s: %s", failure.mesh_name, message, decision.reason)
        if decision.action is Action.ESCALATE:
            self._give_up(f"it has failed too often: {message}")
            return
        if failure.mesh_name == self._acting.name:
            self._run(self._acting.end(message))
            self._now, self._acting = None, self._spare
            self._run(self._bring_up(self._acting))
        else:
            self._run(self._spare.end(message))
        self._spare = self._start()

    async def end(self) -> None:
        """The store is shut down."""
        acting, self._now = self._now, None
        self._give_up("the store was shut down")
        if acting is not None:
            with suppress(SupervisionError, ActorError):  # it is dead, or will be in a moment
                await acting.actor.retire.call_one()
        await asyncio.gather(*(each.end("its store was shut down") for each in (self._acting, self._spare)))
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._memory.close()

    def _start(self) -> _Candidate:
        return _Candidate.start(self._name, self._store_name, next(self._lives))

    async def _bring_up(self, candidate: _Candidate) -> None:
        try:
            process = await candidate.actor.succeed.call_one(self._volumes, self._settings, self._memory.address)
        except SupervisionError:
            return  # it has died: `supervise` is told
        except ActorError as error:
            self._give_up(str(error.cause if isinstance(error.cause, StoreError) else error))
            return
        if candidate is self._acting and not self._why_lost:
            self._now = Successor(candidate.life, candidate.actor, process)
            self._wake()

    def _give_up(self, why: str) -> None:
        self._why_lost = self._why_lost or f"the store's controller is gone: {why}"
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, timeout: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), max(timeout, 0.001))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
