"""`Recoverable`: processes with actors on them that their owner makes again when they fail."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from skipper.control.api.actor import Actor
from skipper.control.api.mesh import HostMesh, ProcMesh, this_host
from skipper.control.cluster.recovery.policy import Action, Attempt, Decision, RecoveryPolicy
from skipper.control.model.errors import ControlError
from skipper.control.model.failure import FailureKind, MeshFailure
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.context import context
from skipper.control.support.daemon_threads import DaemonThreads

if TYPE_CHECKING:
    from skipper.control.api.views import ActorMesh

_log = logging.getLogger("skipper.control")

A = TypeVar("A", bound=Actor)

_threads = DaemonThreads(8, name="control-replace-host")
"""The threads for requests to engines for hosts. They may take long, and block no exit."""


class Recoverable(Generic[A]):
    """Processes and the actors on them, owned by an actor that passes their failures on to `supervise`.

    One generation of processes is a *life*. When a member fails, the whole life ends: the rest of it is killed. The
    next one is made as the policy decides, while the owner keeps running. For owners whose endpoints are ``async``;
    make it in the owner's ``__init__`` or in an endpoint.

    Args:
        name: name of its meshes; from the second life on, the number of the life is appended.
        make: spawns the processes and then the actors, both under the name that it gets, and returns at once.
        policy: what to do about failures.
        hosts: the hosts to spawn on; None: this host. The successor of a lost host replaces it here, too.
        on_made: called with this object whenever a life has been made, including the first one.

    Example:
        ```python
        import asyncio
        import os
        import signal

        from skipper.control import Actor, ActorMesh, HostMesh, MeshFailure, ProcMesh
        from skipper.control import SupervisionError, endpoint, this_proc
        from skipper.control.cluster.recovery import Recoverable, RecoveryPolicy

        class Worker(Actor):
            @endpoint
            def pid(self) -> int:
                return os.getpid()

        def make(hosts: HostMesh, name: str) -> tuple[ProcMesh, ActorMesh[Worker]]:
            procs = hosts.spawn_procs({"gpus": 2}, name=name)
            return procs, procs.spawn(name, Worker)

        class Owner(Actor):
            def __init__(self) -> None:
                self.crew = Recoverable("crew", make, RecoveryPolicy())

            async def __supervise__(self, failure: MeshFailure) -> bool:
                return self.crew.supervise(failure)

            @endpoint
            async def pids(self) -> tuple[int, list[int]]:
                while True:
                    if self.crew.actors is not None:  # None between two lives
                        try:
                            return self.crew.life, list(await self.crew.actors.pid.call())
                        except SupervisionError:
                            pass
                    await asyncio.sleep(0.01)

        owner = this_proc().spawn("owner", Owner)
        life, pids = owner.pids.call_one().get(timeout=60)
        os.kill(pids[0], signal.SIGKILL)
        while owner.pids.call_one().get(timeout=60)[0] == life:
            pass
        print(len(owner.pids.call_one().get(timeout=60)[1]))  # 2
        ```
    """

    def __init__(
        self,
        name: str,
        make: Callable[[HostMesh, str], tuple[ProcMesh, ActorMesh[A]]],
        policy: RecoveryPolicy,
        *,
        hosts: HostMesh | None = None,
        on_made: Callable[[Recoverable[A]], None] | None = None,
    ) -> None:
        self.name = name
        self.life = 0
        """How many lives there have been before this one."""
        self.hosts = this_host() if hosts is None else hosts
        """Where this life is, or the next one will be."""
        self._make = make
        self._policy = policy
        self._on_made = on_made
        self._history: list[Attempt] = []
        self._me = context().actor_instance
        self._procs: ProcMesh | None = None
        self._actors: ActorMesh[A] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._reviving: asyncio.Task[None] | None = None
        self._is_over = False
        self._bear()

    @property
    def actors(self) -> ActorMesh[A] | None:
        """The actors of this life, which may still be starting; None between two lives."""
        return self._actors

    @property
    def procs(self) -> ProcMesh | None:
        """The processes of this life; None between two lives."""
        return self._procs

    def owns(self, failure: MeshFailure) -> bool:
        """Whether a failure belongs to one of its lives."""
        name, dot, number = failure.mesh_name.rpartition(".")
        return failure.mesh_name == self.name or (dot == "." and name == self.name and number.isdecimal())

    def supervise(self, failure: MeshFailure) -> bool:
        """Handle a failure of one of its lives as the policy decides; returns at once.

        Call it in the owner's ``__supervise__``, and return its result there. Failures of lives that have ended, and of
        further members of a life that has failed, need no action.

        Returns:
            False if the owner should fail.
        """
        if self._is_over or self._actors is None or failure.mesh_name != self._life_name:
            return True
        self._bury(failure.root_cause().message)
        decision = self._decide(failure)
        if decision.action is Action.ESCALATE:
            return False
        self._reviving = self._run(self._revive(decision))
        return True

    def condemn(self, reason: str) -> bool:
        """End this life because the owner knows that it is useless: for example, it missed a deadline.

        Returns:
            False if the owner should fail, because the policy does not allow another life.
        """
        failure = MeshFailure(self._life_name, self._life_name, None, FailureKind.UNREACHABLE, reason)
        return self.supervise(failure)

    async def end(self) -> None:
        """End it finally, by a kill. It may be called again."""
        self._is_over = True
        if self._reviving is not None:
            self._reviving.cancel()
        self._bury("it is no longer needed")
        while self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def _life_name(self) -> str:
        return f"{self.name}.{self.life}" if self.life else self.name

    def _decide(self, failure: MeshFailure) -> Decision:
        """Decide what to do, and note it as done."""
        now_s = time.monotonic()
        self._history = self._policy.remembered(self._history, now_s)
        is_host_lost = not all(self.hosts.alive())
        decision = self._policy.decide(failure, self._history, now_s, is_host_lost=is_host_lost)
        self._history.append(Attempt(decision.action, now_s + decision.delay_s))
        _log.warning("%s: %s: %s", self._life_name, failure.root_cause().message, decision.reason)
        return decision

    def _bear(self) -> None:
        self._procs, self._actors = self._make(self.hosts, self._life_name)
        if self._on_made is not None:
            self._on_made(self)

    def _bury(self, reason: str) -> None:
        """Kill the rest of this life, and forget it; returns at once."""
        procs, self._procs, self._actors = self._procs, None, None
        if procs is not None:
            # First a kill: a frozen process would not stop on request.
            runtime.current().remote_launch.kill_mesh(procs.uid, procs.root_members, f"was killed: {reason}")
            self._run(_end_of(procs))

    async def _revive(self, decision: Decision) -> None:
        """Make the next life, as decided; an error in that is another failure."""
        await asyncio.sleep(decision.delay_s)
        try:
            if decision.replace is not None:
                run = contextvars.copy_context().run
                await asyncio.get_running_loop().run_in_executor(_threads, run, decision.replace.ask)
            self.hosts = self.hosts.latest()  # even if other code has replaced them
            self.life += 1
            self._bear()
        except (ControlError, TimeoutError) as error:
            self._history[-1] = dataclasses.replace(self._history[-1], is_done=False)
            message = f"{self._life_name} ended, and its successor could not be started: {error}"
            failure = MeshFailure(self._life_name, self._life_name, None, FailureKind.UNREACHABLE, message)
            decision = self._decide(failure)
            if decision.action is Action.ESCALATE:
                self._me.abort(f"{message}; {decision.reason}")
            else:
                self._reviving = self._run(self._revive(decision))

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._has_ended)
        return task

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._me.abort(f"{self.name}: {type(error).__name__}: {error}")


async def _end_of(procs: ProcMesh) -> None:
    # A lost host cannot report that they have ended. They have: they end with their link.
    with contextlib.suppress(ControlError):
        await procs.stop()


class AttachedHosts:
    """Hosts that were attached by their addresses: one that is lost is attached again, once its agent answers.

    ``ReplaceHost(AttachedHosts(hosts), attempts=20)`` waits for a machine that is cut off, or that starts again.

    Args:
        hosts: the mesh that `attach_to_hosts` has returned.

    Raises:
        ValueError: it is this host.

    Example:
        ```python
        from skipper import control
        from skipper.control.cluster.hollow import HollowHosts
        from skipper.control.cluster.recovery import AttachedHosts, RecoveryPolicy, ReplaceHost

        with HollowHosts(2) as hollow:  # in place of two machines with an agent each
            hosts = hollow.attach()
            policy = RecoveryPolicy(host=ReplaceHost(AttachedHosts(hosts), attempts=20))
            control.shutdown()
        ```
    """

    def __init__(self, hosts: HostMesh) -> None:
        if not hosts.names:
            raise ValueError("this host is the script's own, not an attached one: it cannot be replaced")
        self._hosts = hosts

    def replace(self, *, timeout: float) -> HostMesh:
        """Attach the lost hosts again.

        Raises:
            HostUnreachableError: the agent of one of them does not answer.
            HostError: its agent refuses.
        """
        return self._hosts.reattach(timeout=timeout)
