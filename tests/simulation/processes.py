"""Processes of a simulated job: their loops, their actors' turns, their births and deaths."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from skipper.control.model.failure import MeshFailure
from skipper.control.model.future import Gate
from skipper.control.runtime import current_runtime
from skipper.control.runtime.actor_state import ActorEndedError, ActorState
from skipper.control.runtime.assembly import build_process
from skipper.control.runtime.executor import AsyncExecutor, NewExecutor
from skipper.control.runtime.procs import children
from skipper.control.runtime.procs.launcher import Launched, LaunchRequest
from skipper.control.runtime.procs.worker_config import EXIT_ORPHAN
from skipper.control.runtime.shared_executor import SharedExecutor
from skipper.control.runtime.shared_parts import SharedParts
from skipper.control.runtime.supervision import RootActor
from skipper.control.wire.addresses import host_of
from skipper.control.wire.process_ref import ProcessRef
from tests.simulation.world import World

if TYPE_CHECKING:
    from skipper.control.runtime.process import Process
    from tests.simulation.network import Ether, VirtualNetwork

T = TypeVar("T")

KILLED = -signal.SIGKILL

_BIRTH_S = (0.01, 0.3)
_DEATH_S = 0.02
"""Within this time the kernel has told a launcher of a death, and a child of its launcher's."""

SECRET = bytes(32)


class VirtualLoop(asyncio.AbstractEventLoop):
    """The event loop of one process, as far as the runtime uses it."""

    def __init__(self, world: World, owner: SimulatedProcess) -> None:
        self._world = world
        self._owner = owner
        self._soon_s = 0.0
        self._readers: dict[int, tuple[Callable[..., object], tuple[Any, ...]]] = {}
        self.is_over = False

    def time(self) -> float:
        return self._world.now_s

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        """In the order of the calls, a moment after another."""
        self._soon_s = max(self._soon_s, self._world.now_s + 50e-6 * self._world.chance.random())
        return self._world.at(self._soon_s, self._owner, callback, *args, context=context)

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        return self.call_soon(callback, *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        return self.call_at(self._world.now_s + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        return self._world.at(when, self._owner, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, **options)

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:
        self._readers[fd] = callback, args

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd, None) is not None

    def readable(self, fd: int) -> None:
        """Something can be read there: whoever has looked out for that is told."""
        reader = self._readers.get(fd)
        if reader is not None:
            reader[0](*reader[1])

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self.is_over

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._owner.is_dead:  # whose tasks nobody ends
            self._world.violation(f"{self._owner}: {context.get('message')}: {context.get('exception')!r}")


class ActorLoop(VirtualLoop):
    """The event loop of one async actor. It is the running one for what happens there."""

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        return super().call_soon(self._within, callback, *args, context=context or contextvars.copy_context())

    def call_at(self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        context = context or contextvars.copy_context()
        return self._world.at(when, self._owner, self._within, callback, *args, context=context)

    async def shutdown_asyncgens(self) -> None:
        """Nobody has any."""

    def _within(self, callback: Callable[..., object], *args: Any) -> None:
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            callback(*args)
        finally:
            asyncio._set_running_loop(before)


class VirtualAsyncExecutor(AsyncExecutor):
    """Runs an async actor on the virtual clock."""

    def __init__(self, actor: ActorState, world: World, owner: SimulatedProcess) -> None:
        self._loop_of_actor = ActorLoop(world, owner)
        super().__init__(actor)

    def _make_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop_of_actor

    def _make_thread(self) -> threading.Thread:
        return threading.current_thread()

    def start(self) -> None:
        """Construct the actor in a moment."""
        self._loop_of_actor.call_soon(self._begin, context=contextvars.Context())

    def interrupt(self) -> bool:
        """True: nothing blocks the loop."""
        return True

    def stack(self) -> list[traceback.FrameSummary]:
        """Empty: nobody asks here where an actor is."""
        return []

    def _begin(self) -> None:
        self._loop_of_actor.create_task(self._main()).add_done_callback(self._over)

    def _over(self, main: asyncio.Task[None]) -> None:
        self._loop_of_actor.is_over = True
        error = None if main.cancelled() else main.exception()
        if error is not None:
            if not isinstance(error, ActorEndedError):
                self._break(error)
            self._actor.bury()


class VirtualThread:
    """What stands for the loop's thread, and for that of the actors."""

    def __init__(self, world: World, owner: SimulatedProcess, loop: VirtualLoop) -> None:
        self.loop = loop
        self.thread = threading.current_thread()
        self.is_beginning = True
        self._world = world
        self._owner = owner

    # As a `LoopThread`

    def is_current(self) -> bool:
        """No code that runs on a loop waits for what a loop does."""
        return False

    def run(self, coroutine: Coroutine[Any, Any, T], *, timeout: float) -> T:
        """Run a coroutine to its end, while other things happen; what begins a process waits for nothing."""
        if self.is_beginning:
            with contextlib.suppress(StopIteration):
                coroutine.send(None)
                raise AssertionError("the start of a transport waits")
            return cast(T, None)
        task = self.loop.create_task(coroutine)
        gate = Gate()
        task.add_done_callback(lambda _: gate.open())
        self._world.wait(gate, timeout, takes_all=False)
        if not task.done():
            task.cancel()
            raise TimeoutError
        return task.result()

    # As an `ActorThread`

    def executor_for(self, *, is_async: bool) -> NewExecutor:
        """What runs an actor here."""
        if is_async:
            return lambda actor: VirtualAsyncExecutor(actor, self._world, self._owner)
        return lambda actor: SharedExecutor(actor, self, is_async=False)  # type: ignore[arg-type]

    def put(self, executor: SharedExecutor) -> None:
        """Give an actor a turn."""
        self._world.soon(self._owner, self._turn, executor)

    @staticmethod
    def _turn(executor: SharedExecutor) -> None:
        contextvars.Context().run(executor.take_turn)


class SimulatedProcess:
    """One process.

    Args:
        cluster: that it is in.
        me: it.
        root: the script of its job.
        parent: the process that launches it; None: nobody here does.

    Attributes:
        number: of the process in its cluster.
        is_host: whether it stands for the job on a host.
        is_dead: whether it is gone.
        is_silent: whether it is gone without a word: its host has lost its power, or its network for good.
        stalled_until_s: it does nothing before.
        when_dead: called once it is dead.
    """

    def __init__(self, cluster: Cluster, me: ProcessRef, root: ProcessRef, parent: SimulatedProcess | None) -> None:
        from tests.simulation.network import VirtualNetwork

        self.cluster = cluster
        self.world = cluster.world
        self.number = len(cluster.processes)
        self.ip = host_of(me.address) or "here"
        self.name = me.name
        self.id = me.id
        self.parent = parent
        self.is_host = False
        self.is_dead = self.is_silent = False
        self.stalled_until_s = 0.0
        self.when_dead: list[Callable[[], object]] = []
        self.children: list[SimulatedChild] = []
        self.loop = VirtualLoop(self.world, self)
        self.runtime: Process | None = None
        cluster.processes.append(self)
        cluster.by_id[me.id] = self
        thread = VirtualThread(self.world, self, self.loop)
        self.network: VirtualNetwork = VirtualNetwork(cluster.ether, self, SECRET)
        shared = SharedParts(
            network_for=lambda me, secret: self.network,
            executor_for=thread.executor_for,
            launcher=SimulatedLauncher(self),
            end=lambda: self.die(0),
        )
        before = self.world.current
        self.world.enter(self)
        try:
            self.runtime = build_process(me, root, SECRET, thread, data_plane_is_open=False, shared=shared)  # type: ignore[arg-type]
            thread.is_beginning = False
        finally:
            self.world.enter(before)

    @property
    def process(self) -> Process:
        """Its runtime."""
        assert self.runtime is not None
        return self.runtime

    def die(self, status: int = KILLED, *, silently: bool = False) -> None:
        """End it at once, and then what it has launched."""
        if self.is_dead:
            return
        self.world.tell(f"{self} is gone, status {status}{', silently' if silently else ''}")
        self.is_dead, self.is_silent, self.loop.is_over = True, silently, True
        for told in self.when_dead:
            told()
        self.cluster.ether.process_gone(self, silently=silently)
        for child in self.children:
            if silently:
                child.vanish()
            else:
                self.world.at(self.world.now_s + _DEATH_S * self.world.chance.random(), None, child.kill)
        self.cluster.died(self, status)

    def stall(self, seconds: float) -> None:
        """Do nothing for so long."""
        self.stalled_until_s = max(self.stalled_until_s, self.world.now_s + seconds)

    def __str__(self) -> str:
        return f"{self.name}#{self.number}"


class SimulatedChild:
    """A process as its launcher sees it: a `StartedProcess`."""

    def __init__(self, parent: SimulatedProcess) -> None:
        self.pid = 100 + len(parent.cluster.processes)
        parent.cluster.launched += 1
        self.pidfd = parent.cluster.launched
        self.process: SimulatedProcess | None = None
        self._parent = parent
        self._status: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether it was killed before it was there."""
        return self._status is not None

    def kill(self) -> None:
        """As SIGKILL does."""
        if self.process is None:
            self.ended(KILLED)
        else:
            self.process.die()

    def vanish(self) -> None:
        """Its host is gone."""
        if self.process is not None:
            self.process.die(silently=True)

    def ended(self, status: int) -> None:
        """It is gone: its launcher is told."""
        if self._status is not None:
            return
        self._status = status
        parent = self._parent
        if parent.is_dead:
            return
        when_s = parent.world.now_s + _DEATH_S * parent.world.chance.random()
        parent.world.at(when_s, parent, self._tell)

    def _tell(self) -> None:
        self._parent.loop.readable(self.pidfd)

    def when_buried(
        self,
        loop: asyncio.AbstractEventLoop,
        describe: Callable[[int], str],
        done: Callable[[str], None],
        cleared: Callable[[], None],
    ) -> None:
        """See `StartedProcess.when_buried`."""
        done(describe(self._status or 0))
        cleared()


class SimulatedLauncher:
    """Starts the children of one process: a `ChildLauncher`."""

    def __init__(self, parent: SimulatedProcess) -> None:
        self._parent = parent

    def launch(self, launches: Sequence[LaunchRequest], env: Mapping[str, str], modules: tuple[str, ...]) -> None:
        """See `ChildLauncher.launch`."""
        for launch in launches:
            self._later(self._start, launch)

    def hurry(self) -> None:
        """See `ChildLauncher.hurry`."""

    def close(self) -> None:
        """See `ChildLauncher.close`."""

    def _later(self, call: Callable[..., object], *arguments: object) -> None:
        world = self._parent.world
        world.at(world.now_s + world.chance.uniform(*_BIRTH_S), self._parent, call, *arguments)

    def _start(self, launch: LaunchRequest) -> None:
        child = SimulatedChild(self._parent)
        self._parent.children.append(child)
        launch.done(Launched(child, None))
        self._later(self._bear, child, launch)

    def _bear(self, child: SimulatedChild, launch: LaunchRequest) -> None:
        if child.is_over:
            return
        config, cluster = launch.config, self._parent.cluster
        process = SimulatedProcess(cluster, config.me, config.root, self._parent)
        child.process = process
        cluster.child_of[process.id] = child
        cluster.world.tell(f"{process} is born")
        current_runtime.meet_parent(process.process, config, lambda _: process.die(EXIT_ORPHAN))


class SimulatedScript(RootActor):
    """The script: it notes every failure that reaches it."""

    def __init__(self, owner: SimulatedProcess) -> None:
        process = owner.process
        super().__init__(process.state, process.ports, name="root", shutdown=lambda: None)
        self.told: Counter[tuple[str, str]] = Counter()
        """How often it was told that a mesh has lost a process."""
        self.on_failure: Callable[[MeshFailure], object] = lambda failure: None
        self._lost: set[str] = set()
        self._world = owner.world

    def has_lost(self, process_id: str) -> bool:
        """Whether it was told that a process is gone."""
        return process_id in self._lost

    def note_told(self, mesh_name: str, process_id: str) -> None:
        """It was told that a mesh has lost a process."""
        self.told[mesh_name, process_id] += 1
        self._lost.add(process_id)

    def owned_failed(self, failure: MeshFailure) -> None:
        """Note it."""
        self._world.tell(f"the script is told: {failure.headline()}")
        self.on_failure(failure)


class Cluster:
    """The processes of one job, on some hosts.

    Args:
        world: that they are in.
        ether: their network.
        hosts: how many hosts are attached beside that of the script.

    Attributes:
        script: the process of the script.
        launched: how many processes others have started.
        begin_logs: the logs of begun requests, with their processes, by what tells them from others.
        hosts: those that stand for the job on the others.
    """

    def __init__(self, world: World, ether: Ether, hosts: int) -> None:
        self.world = world
        self.ether = ether
        self.processes: list[SimulatedProcess] = []
        self.by_id: dict[str, SimulatedProcess] = {}
        self.child_of: dict[str, SimulatedChild] = {}
        self.launched = 0
        self.begin_logs: dict[int, tuple[SimulatedProcess, memoryview]] = {}
        me = _named("script", _ip(0) if hosts else "")
        self.script = SimulatedProcess(self, me, me, None)
        script = self.script.process
        world.enter(self.script)
        self.root = SimulatedScript(self.script)
        script.own_as(self.root)
        self.hosts: list[SimulatedProcess] = []
        for host in range(1, hosts + 1):
            ref = _named(f"host {_ip(host)}", _ip(host), script.me)
            process = SimulatedProcess(self, ref, script.me, None)
            process.process.transport.expect(script.me)
            process.process.remote_launch.stand_for_job(lambda reason, process=process: process.die())  # type: ignore[misc]
            there = ProcessRef(ref.id, process.process.me.address, ref.name, script.me)
            script.remote_launch.attached(there)
            process.is_host = True
            self.hosts.append(process)
            script.transport.link(there)
        world.enter(None)

    def died(self, process: SimulatedProcess, status: int) -> None:
        """A process is gone."""
        child = self.child_of.get(process.id)
        if child is not None:
            child.ended(status)


class _Descriptors:
    """The descriptors of ended processes, which `Children` closes."""

    @staticmethod
    def close(descriptor: int) -> None:
        """Do nothing: they are numbers alone, so that a job may have more processes than a process has descriptors."""


def install() -> None:
    """Have the descriptors of processes be those of simulated ones."""
    setattr(children, "os", _Descriptors)  # noqa: B010  (a module's own import)


def _ip(host: int) -> str:
    return f"10.0.{host >> 8}.{host & 255}"


def _named(name: str, ip: str, launcher: ProcessRef | None = None) -> ProcessRef:
    import dataclasses

    from skipper.control.wire.addresses import at

    ref = current_runtime.new_process_ref(name, launcher)
    return dataclasses.replace(ref, address=at(ip, 0)) if ip else ref
