"""Controllers of a store with a journal: one after the other, each in a process of its own.

The actor with the store's name starts the volumes and keeps the memory of the journal. It starts a controller that
reads and writes the journal, and a spare one, which has imported everything that it needs. When the controller dies,
the spare one continues from the journal, and another spare one is started. Clients ask here which controller is active,
first and whenever they have lost theirs.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from skipper.control import Actor, ActorError, ControlError, ProcMesh, SupervisionError, this_host
from skipper.control.model.failure import MeshFailure
from skipper.control.runtime import current_runtime as runtime
from skipper.torchstore.controller.journal import JournalMemory
from skipper.torchstore.controller.volumes import Volumes
from skipper.torchstore.errors import ControllerLostError, StoreError, StoreNotInitializedError, StoreTimeoutError
from skipper.torchstore.protocol.messages import Controller, StoreInfo, StoreSettings, Successor
from skipper.torchstore.support.deadlines import ask
from skipper.torchstore.support.process import ProcessId

_log = logging.getLogger("skipper.torchstore")

_DEATHS = 60  # deaths of controllers in a minute; one more ends the store
_DEATHS_WITHIN_S = 60.0
_FAILED_STARTS = 3  # consecutive starts of controllers that cannot continue from the journal
_SPARE_BACKOFF_S = 1.0
_LONGEST_BACKOFF_S = 30.0
START_TIMEOUT_S = 60.0
_STILL_THERE_S = 2.0
_RETIRE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A process with a controller: a spare, starting, active or former one."""

    life: int
    name: str
    procs: ProcMesh
    actor: Controller

    @staticmethod
    def start(actor_class: type[Actor], name: str, store_name: str, life: int) -> _Candidate:
        own = f"{name}.{life}"
        procs = this_host().spawn_procs(per_host={"gpus": 1}, name=own)
        return _Candidate(life, own, procs, procs.spawn(own, actor_class, store_name))

    async def end(self, reason: str) -> None:
        """Kill it: a frozen process does not stop on request."""
        runtime.current().remote_launch.kill_mesh(self.procs.uid, self.procs.root_members, f"was killed: {reason}")
        with suppress(ControlError):
            await self.procs.stop()


class Succession:
    """The controllers of one store. Its async actor passes failures on.

    Raises:
        JournalError: There is not enough memory for the journal.
    """

    def __init__(
        self, actor_class: type[Actor], store_name: str, volumes: Volumes, settings: StoreSettings, lives: Iterator[int]
    ) -> None:
        self._actor_class = actor_class
        self._store_name = store_name
        self._name = f"torchstore-{store_name}-controller"
        self._volumes = volumes
        self._settings = settings
        self._lives = lives
        self._deaths: deque[float] = deque()
        self._failed_starts = 0
        self._spare_failures = 0
        self._lost: StoreError | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._now: Successor | None = None
        self._spare: _Candidate | None = None
        self._memory = JournalMemory()
        try:
            self._acting = self._start()
        except BaseException:
            self._memory.close()
            raise
        self._run(self._bring_up(self._acting))
        self._run(self._prepare_spare())

    async def after(self, life: int, timeout: float) -> Successor:
        """The controller after one, or that one itself if it still exists after a while.

        Raises:
            ControllerLostError: There will be none.
            StoreTimeoutError: None was there in time.
        """
        begin = time.monotonic()
        while True:
            if self._lost is not None:
                raise copy.copy(self._lost)
            waited_s = time.monotonic() - begin
            if self._now is not None and (self._now.life > life or waited_s >= _STILL_THERE_S):
                return self._now
            if waited_s >= timeout:
                raise StoreTimeoutError(f"after {timeout:.3g} s: no spare controller has taken over")
            left = [timeout - waited_s, *([_STILL_THERE_S - waited_s] if self._now is not None else [])]
            await self._change(min(left))

    async def welcome(self, process: ProcessId, procs: ProcMesh) -> StoreInfo:
        """Register a client of the store.

        Raises:
            ControllerLostError: The store is lost.
            StoreTimeoutError: No controller was there in time.
            JournalError: There is no memory for another client.
        """
        life, end = -1, time.monotonic() + START_TIMEOUT_S
        while True:
            successor = await self.after(life, max(end - time.monotonic(), 0.0))
            try:
                info: StoreInfo = await ask(
                    successor.actor.info.call_one(process, procs), max(end - time.monotonic(), 0.001)
                )
            except SupervisionError:
                life = successor.life
            else:
                return replace(info, successor=successor)

    def supervise(self, failure: MeshFailure) -> None:
        """Replace a failed controller by the spare one; ignore failures of other actors."""
        message = failure.root_cause().message
        if failure.mesh_name == self._acting.name:
            self._lose(self._acting, message)
        elif self._spare is not None and failure.mesh_name == self._spare.name:
            spare, self._spare = self._spare, None
            self._spare_failures += 1
            _log.warning("%s, a spare controller, failed: %s", spare.name, message)
            self._run(spare.end(message))
            self._run(self._prepare_spare())

    async def end(self) -> None:
        """End all controllers: the store is shut down."""
        acting, self._now = self._now, None
        self._give_up(StoreNotInitializedError(self._store_name))
        try:
            if acting is not None:
                with suppress(SupervisionError, ActorError, StoreError):  # it is dead, or will be soon
                    await ask(acting.actor.retire.call_one(), _RETIRE_TIMEOUT_S)
            candidates = [self._acting, *([self._spare] if self._spare is not None else [])]
            await asyncio.gather(*(each.end("its store was shut down") for each in candidates), return_exceptions=True)
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            self._memory.close()

    def _start(self) -> _Candidate:
        return _Candidate.start(self._actor_class, self._name, self._store_name, next(self._lives))

    async def _prepare_spare(self) -> None:
        """Start a spare controller; after a while, if earlier ones have failed."""
        if self._spare_failures:
            delay_s = min(_SPARE_BACKOFF_S * 2 ** min(self._spare_failures - 1, 10), _LONGEST_BACKOFF_S)
            end = time.monotonic() + delay_s
            while self._lost is None and time.monotonic() < end:
                await self._change(end - time.monotonic())
        if self._lost is None and self._spare is None:
            try:
                self._spare = self._start()
            except ControlError as error:
                self._spare_failures += 1
                _log.warning("the store %s has no spare controller: %s", self._store_name, error)
                self._run(self._prepare_spare())

    async def _take_over(self, candidate: _Candidate) -> None:
        await self._bring_up(candidate)
        await self._prepare_spare()  # only now, when nobody waits: starting a process takes CPU time from all

    async def _bring_up(self, candidate: _Candidate) -> None:
        """Let a controller continue where the earlier one ended."""
        try:
            process = await candidate.actor.succeed.call_one(self._volumes, self._settings, self._memory.address)
        except SupervisionError as error:
            self._lose(candidate, str(error))  # it may have died as a spare
        except ActorError as error:
            self._failed_starts += 1
            self._lose(candidate, str(error.cause if isinstance(error.cause, StoreError) else error))
        else:
            if candidate is self._acting and self._lost is None:
                self._failed_starts = self._spare_failures = 0
                self._now = Successor(candidate.life, candidate.actor, process)
                self._wake()

    def _lose(self, candidate: _Candidate, message: str) -> None:
        """Note that the active controller has failed. A second call for the same one changes nothing."""
        if candidate is not self._acting or self._lost is not None:
            return
        self._now = None
        now_s = time.monotonic()
        self._deaths.append(now_s)
        while self._deaths[0] < now_s - _DEATHS_WITHIN_S:
            self._deaths.popleft()
        self._run(candidate.end(message))
        if len(self._deaths) > _DEATHS or self._failed_starts >= _FAILED_STARTS:
            self._give_up(ControllerLostError(f"the store's controller has failed too often: {message}"))
            return
        _log.warning("%s was replaced by another controller: %s", candidate.name, message)
        try:
            self._acting, self._spare = self._spare or self._start(), None
        except ControlError as error:
            self._give_up(
                ControllerLostError(f"the store's controller has failed ({message}), and its successor too: {error}")
            )
            return
        self._run(self._take_over(self._acting))

    def _give_up(self, why: StoreError) -> None:
        self._lost = self._lost or why
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
