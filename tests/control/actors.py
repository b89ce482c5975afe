"""Actors that several test files use; no pytest here, so that processes which import it start quickly."""

import asyncio
import ctypes
import os
import signal
import threading
import time
from typing import Any

from skipper.control import (
    Actor,
    ActorMesh,
    ControlError,
    MeshFailure,
    Port,
    ProcMesh,
    context,
    current_rank,
    endpoint,
    this_host,
)


class Echo(Actor):
    """Answers with what it got."""

    @endpoint
    def echo(self, value: object) -> object:
        return value

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def fail(self, error: Exception) -> None:
        raise error

    @endpoint
    def run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    @endpoint
    def where(self) -> tuple[dict[str, int], dict[str, int], str]:
        here = context()
        return dict(here.actor_instance.rank), dict(here.message_rank), here.actor_instance.actor_id

    @endpoint
    def signature(self, a: int, /, b: int, *rest: int, c: int = 3, **more: int) -> tuple[Any, ...]:
        return a, b, rest, c, more

    @endpoint
    def die(self, how: str = "kill") -> None:
        if how == "kill":
            signal.raise_signal(signal.SIGKILL)
        elif how == "segv":
            signal.raise_signal(signal.SIGSEGV)
        os._exit(7)

    @endpoint
    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @endpoint
    def freeze(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)  # the stop may take a moment: no answer before it

    @endpoint
    def hold_lock(self, seconds: float) -> int:
        """Keep the interpreter lock from all other threads, as a long call into C may."""
        ctypes.PyDLL(None).usleep(int(1e6 * seconds))
        return os.getpid()


class Recorder(Actor):
    """Remembers in which order messages came, and on which thread."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.local = threading.local()
        self.local.born = True

    @endpoint
    def note(self, value: Any) -> None:
        self.seen.append(value)

    @endpoint
    def everything(self) -> list[Any]:
        return self.seen

    @endpoint
    def thread_is_the_same(self) -> bool:
        return getattr(self.local, "born", False)


class AsyncEcho(Actor):
    """The async kind."""

    def __init__(self) -> None:
        self.running = 0
        self.loop = asyncio.get_running_loop()

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def overlap(self, seconds: float) -> int:
        self.running += 1
        most = self.running
        await asyncio.sleep(seconds)
        self.running -= 1
        return most

    @endpoint
    async def rank_after_waiting(self) -> tuple[int, bool]:
        await asyncio.sleep(0)
        return current_rank().rank, self.loop is asyncio.get_running_loop()

    @endpoint
    async def call(self, other: ActorMesh[Any], value: Any) -> Any:
        return await other.echo.call_one(value)

    @endpoint
    async def wait_for(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Answerer(Actor):
    """Answers through explicit ports."""

    def __init__(self) -> None:
        self.kept: list[Port[Any]] = []

    @endpoint(explicit_response_port=True)
    def from_a_thread(self, port: Port[Any], value: Any) -> None:
        threading.Thread(target=port.send, args=(value,)).start()

    @endpoint(explicit_response_port=True)
    def keep(self, port: Port[Any]) -> None:
        self.kept.append(port)

    @endpoint
    def release(self, value: Any) -> int:
        for port in self.kept:
            port.send(value)
        count = len(self.kept)
        self.kept.clear()
        return count

    @endpoint(explicit_response_port=True)
    def drop(self, port: Port[Any]) -> None:
        """Lets go of the port unanswered."""

    @endpoint(explicit_response_port=True)
    def refuse(self, port: Port[Any]) -> None:
        port.exception(KeyError("no such thing"))

    @endpoint(explicit_response_port=True)
    def raises(self, port: Port[Any]) -> None:
        raise ValueError("before answering")

    @endpoint(explicit_response_port=True)
    def pass_on(self, port: Port[Any], other: ActorMesh[Any], value: Any) -> None:
        other.send_to.broadcast(port, value)

    @endpoint(explicit_response_port=True)
    def pass_on_for_keeps(self, port: Port[Any], other: ActorMesh[Any]) -> None:
        other.keep_for.broadcast(port)

    @endpoint
    def keep_for(self, port: Port[Any]) -> None:
        self.kept.append(port)

    @endpoint
    def has_kept(self) -> int:
        return len(self.kept)

    @endpoint
    def send_to(self, port: Port[Any], value: Any) -> None:
        port.send(value)


class BadConstruction(Actor):
    def __init__(self) -> None:
        raise RuntimeError("cannot be made")

    @endpoint
    def anything(self) -> None:
        """Never runs."""


class Manager(Actor):
    """Owns a mesh and handles its failures, or does not."""

    def __init__(self, verdict: Any = True) -> None:
        self.verdict = verdict
        self.failures: list[MeshFailure] = []
        self.names: list[str] = []

    @endpoint
    def grow(self, size: int) -> ActorMesh[Echo]:
        self.procs = this_host().spawn_procs({"x": size}, name="grown")
        self.mesh = self.procs.spawn("leaves", Echo)
        return self.mesh

    @endpoint
    def hand_over_procs(self) -> ProcMesh:
        return self.procs

    @endpoint
    def sibling(self, cls: type[Actor]) -> ActorMesh[Any]:
        return context().proc.spawn("sibling", cls)

    @endpoint
    def wait_for_leaf_to_die(self) -> str:
        """Waits for an answer that cannot come, while the failure of the leaf is supervised."""
        try:
            self.mesh.slice(x=0).die.call_one().get(20)
        except ControlError as error:
            return f"{type(error).__name__} {len(self.failures)}"
        return "no error"

    @endpoint
    def seen(self) -> list[MeshFailure]:
        return self.failures

    @endpoint
    def context_names(self) -> list[str]:
        return self.names

    def __supervise__(self, failure: MeshFailure) -> object:
        self.failures.append(failure)
        self.names.append(context().actor_instance.name)
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict


class AsyncManager(Actor):
    """The async kind of manager."""

    def __init__(self) -> None:
        self.failures: list[MeshFailure] = []
        self.told = asyncio.Event()

    @endpoint
    async def grow(self, size: int) -> ActorMesh[Echo]:
        self.procs = this_host().spawn_procs({"x": size}, name="grown")
        self.mesh = self.procs.spawn("leaves", Echo)
        return self.mesh

    @endpoint
    async def wait_to_be_told(self) -> str:
        await self.told.wait()
        return f"{context().actor_instance.name}: {self.failures[0].mesh_name}"

    async def __supervise__(self, failure: MeshFailure) -> object:
        self.failures.append(failure)
        self.told.set()
        return True


class Cleaner(Actor):
    """Writes into a file when it is cleaned up."""

    def __init__(self, path: str, name: str, raises: bool = False) -> None:
        self.path = path
        self.name = name
        self.raises = raises

    @endpoint
    def own(self, name: str) -> ActorMesh[Any]:
        return context().proc.spawn(name, Cleaner, self.path, name)

    @endpoint
    def note(self, text: str) -> None:
        self._write(text)

    @endpoint
    def own_bad(self, name: str) -> ActorMesh[Any]:
        return context().proc.spawn(name, Cleaner, self.path, name, raises=True)

    @endpoint
    def boom(self) -> None:
        raise RuntimeError("no reply wanted")

    def __cleanup__(self, error: Exception | None) -> None:
        self._write(f"cleanup {self.name} {type(error).__name__}")
        if self.raises:
            raise OSError("cleanup failed")

    def _write(self, text: str) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text + "\n")
