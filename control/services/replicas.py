"""`Replica`: one replica of a service in its controller, from the start of its processes to their end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skipper.control.api.actor import Actor
from skipper.control.api.mesh import HostMesh, ProcMesh
from skipper.control.api.service import ReplicaState, ServiceOptions
from skipper.control.model.errors import ActorError, ControlError
from skipper.control.model.future import Future
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.begin_log import BeginAddress, BeginView, ProcessGoneError
from skipper.control.runtime.requests import BEGINS
from skipper.control.services import gpus
from skipper.control.services.request_sequencer import RequestSequencer

if TYPE_CHECKING:
    from skipper.control.api.views import ActorMesh


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What every replica of a service is created from; ``args`` and ``kwargs`` are for the actors' ``__init__``."""

    service: str
    actor_class: type[Actor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: ServiceOptions


class Replica:
    """One replica; owned by the actor that makes it.

    Attributes:
        number: its place in the service.
        host: the index of its host among those of the service.
        name: name of its meshes; each replica that the service ever has gets another one.
        procs: its processes.
        actors: its actors.
        entry: the actor that takes its requests.
        state: where it is in its life.
        misses: health checks in a row that it has failed.
        begins: where it records which requests it has begun, once it is up.
    """

    def __init__(
        self, blueprint: Blueprint, number: int, life: int, host: tuple[int, HostMesh], taken: list[str]
    ) -> None:
        options = blueprint.options
        env = dict(options.env or {}) | ({gpus.VISIBLE: ",".join(taken)} if options.with_gpus else {})
        self.number = number
        self.host, there = host
        self.name = f"{blueprint.service}-{number}" + (f".{life}" if life else "")
        self.procs: ProcMesh = there.spawn_procs(
            {"procs": options.procs}, env=env, bootstrap=options.bootstrap, name=self.name
        )
        self.actors: ActorMesh[Any] = self.procs.spawn(
            self.name, blueprint.actor_class, *blueprint.args, **blueprint.kwargs
        )
        self.entry: ActorMesh[Any] = self.actors
        if options.procs > 1:  # spawned after the actors, so that it is stopped before them
            self.entry = self.procs.slice(procs=0).spawn(self.name, RequestSequencer, self.actors)
        self.state = ReplicaState.STARTING
        self.misses = 0
        self.begins: BeginAddress | None = None
        self._view: BeginView | None = None
        self._there = there
        self._gpus = taken
        self._setup = options.setup
        self._ready_at: float | None = None

    @staticmethod
    async def start(blueprint: Blueprint, number: int, life: int, host: tuple[int, HostMesh]) -> Replica:
        """Begin to start a replica on a host, given with its index among the hosts of the service.

        Raises:
            ActorError: there are not enough free GPUs for it.
            SupervisionError: it needs GPUs, and the host that has them is lost.
        """
        options = blueprint.options
        taken = await gpus.take(host[1], options.procs) if options.with_gpus else []
        return Replica(blueprint, number, life, host, taken)

    async def come_up(self) -> None:
        """Wait until it is constructed and set up.

        Raises:
            ControlError: it failed earlier.
        """
        await self.actors.initialized
        await self.entry.initialized
        if self._setup is not None:
            await self.call(self._setup, (self.actors,), {})
        await self._open_begins()
        self._ready_at = time.monotonic()

    async def _open_begins(self) -> None:
        process = runtime.current()
        self.begins = await process.request(self.entry.root_members[0], BEGINS, target=self.entry.uid)
        with contextlib.suppress(OSError, ProcessGoneError):  # on another host; or its end will be reported
            self._view = BeginView(self.begins, process.me.id)

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Call it as callers do: in its turn among the requests of others."""
        if self.entry is self.actors:
            answer: Future[Any] = getattr(self.actors, method).call_one(*args, **kwargs)
            return answer
        forwarded: Future[Any] = self.entry.forward.call_one(method, args, kwargs)
        return forwarded

    def has_been_of_use(self, stable_s: float) -> bool:
        """Whether it has been up for this many seconds, or has reached its second request: it survived one."""
        if self._view is not None and self._view.count > 1:
            return True
        return self._ready_at is not None and time.monotonic() - self._ready_at >= stable_s

    async def check(self, endpoint: str, timeout_s: float) -> str | None:
        """Ask it whether it is healthy; returns what is wrong if it is not.

        Raises:
            SupervisionError: it is dead; its owner learns that in any case.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self.call(endpoint, (), {})
        except ActorError as error:
            return error.summary
        except TimeoutError:
            return f"no answer within {timeout_s:g} s"
        return None

    async def stop(self, timeout_s: float) -> None:
        """Let its actors handle their messages within a time limit, then end its processes in any case."""
        verdict = f"it was told to stop, and had not finished after {timeout_s:g} s"
        try:
            async with asyncio.timeout(timeout_s):
                # The limit is kept here: the actors drain until then. A sequencer is first, with all that it passed on.
                await self.entry.stop(2 * timeout_s)
                await self.actors.stop(2 * timeout_s)
        except TimeoutError:
            pass
        except ControlError as error:
            verdict = f"it was told to stop: {error}"
        else:
            verdict = ""
        await self.end(verdict)

    async def end(self, verdict: str = "") -> None:
        """End its processes, in good order or, if there is a ``verdict``, by a kill; free its GPUs and memory."""
        if verdict:
            runtime.current().remote_launch.kill_mesh(
                self.procs.uid, self.procs.root_members, f"was killed because {verdict}"
            )
        await self.procs.stop()
        taken, self._gpus = self._gpus, []
        if taken:
            await gpus.give_back(self._there, taken)
