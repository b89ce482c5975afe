"""Actors for the tests of services."""

import asyncio
import os
import threading
import time
from pathlib import Path

from skipper.control import (
    Actor,
    ActorMesh,
    ControlError,
    Port,
    concurrent_endpoint,
    configure,
    context,
    current_rank,
    endpoint,
    idempotent,
)
from skipper.control.services import Service


class Worker(Actor):
    """Answers, waits, misbehaves and dies as it is told."""

    def __init__(self, tag: str = "") -> None:
        self.tag = tag
        self.notes: list[str] = []

    @endpoint
    @idempotent
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    @idempotent
    def double(self, number: int) -> int:
        return 2 * number

    @endpoint
    def rank_and_tag(self) -> tuple[int, str]:
        return current_rank().rank, self.tag

    @endpoint
    def note(self, text: str) -> list[str]:
        self.notes.append(text)
        return self.notes

    @endpoint
    def fail(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    def wait_for(self, path: str) -> int:
        """Wait until there is such a file."""
        begin_at(path)
        return wait_until_there(path)

    @idempotent
    @endpoint
    def wait_again_for(self, path: str) -> int:
        """The same, and it may be done twice."""
        begin_at(path)
        return wait_until_there(path)

    @endpoint
    @idempotent
    def kill_who_handles(self) -> None:
        os._exit(1)

    @endpoint(explicit_response_port=True)
    def drop(self, port: Port[int]) -> None:
        """Never answer."""

    @endpoint
    @idempotent
    def nbytes(self, value: bytes) -> int:
        return len(value)


class Quitter(Actor):
    """Stops before it has answered, the first time."""

    def __init__(self) -> None:
        self.kept: list[Port[int]] = []

    @endpoint(explicit_response_port=True)
    async def keep_port(self, port: Port[int], path: str) -> None:
        self._keep(port, path)

    @idempotent
    @endpoint(explicit_response_port=True)
    async def keep_port_again(self, port: Port[int], path: str) -> None:
        self._keep(port, path)

    @concurrent_endpoint
    async def work_on(self, path: str) -> int:
        return await self._work(path)

    @idempotent
    @concurrent_endpoint
    async def work_on_again(self, path: str) -> int:
        return await self._work(path)

    def _keep(self, port: Port[int], path: str) -> None:
        if self._is_to_quit(path):
            self.kept.append(port)
            context().actor_instance.stop()
        else:
            port.send(os.getpid())

    async def _work(self, path: str) -> int:
        if self._is_to_quit(path):
            configure(stop_timeout_s=0.2)
            context().actor_instance.stop()
            await asyncio.Event().wait()  # until it is interrupted
        return os.getpid()

    def _is_to_quit(self, path: str) -> bool:
        is_first = not os.path.exists(path)
        with Path(path).open("a") as signs:
            signs.write(f"{os.getpid()} ")
        return is_first


def begin_at(path: str) -> None:
    """Leave a sign that somebody waits there."""
    Path(f"{path}.{os.getpid()}").touch()


def wait_until_there(path: str) -> int:
    deadline = time.monotonic() + 30
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.01)
    return os.getpid()


def break_off_once(path: str, rank: int) -> None:
    if os.path.exists(path):
        return
    if rank == 1:
        Path(path).touch()
        os._exit(1)
    wait_until_there(path)
    raise RuntimeError("a peer is gone")


class Client(Actor):
    """Calls a service from another process."""

    def __init__(self, service: Service[Worker]) -> None:
        self.service = service

    @endpoint
    async def double(self, count: int) -> list[int]:
        return [await self.service.double.route(number) for number in range(count)]

    @endpoint
    async def pids(self) -> list[int]:
        return list(await self.service.pid.fanout())

    @endpoint
    async def wait_for(self, path: str, count: int) -> list[int | str]:
        """The answers to so many requests, or the names of the errors in place of them."""
        futures = [self.service.wait_for.route(path) for _ in range(count)]
        answers: list[int | str] = []
        for future in futures:
            try:
                answers.append(await future)
            except ControlError as error:
                answers.append(type(error).__name__)
        return answers


class KillsWhoOpensIt:
    """An argument."""

    def __reduce__(self) -> tuple[object, ...]:
        return (os._exit, (7,))


class Batcher(Actor):
    """Answers so many requests at a time, with their number."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ports: list[Port[int]] = []
        self.here = 0
        self.all_here = asyncio.Event()

    @endpoint(explicit_response_port=True)
    async def collect(self, port: Port[int], number: int) -> None:
        self.ports.append(port)
        if len(self.ports) == self.size:
            for each in self.ports:
                each.send(self.size)

    @concurrent_endpoint
    async def gather(self, number: int) -> int:
        self.here += 1
        if self.here == self.size:
            self.all_here.set()
        await self.all_here.wait()
        return self.here


class Door(Actor):
    """Comes up unless a file is there: then when that is gone, and a sign of its own that holds it."""

    def __init__(self, shut: str) -> None:
        if not os.path.exists(shut):
            return
        begin_at(shut)
        deadline = time.monotonic() + 30
        while os.path.exists(shut) or os.path.exists(f"{shut}.{os.getpid()}.held"):
            if time.monotonic() > deadline:
                raise TimeoutError(shut)
            time.sleep(0.01)

    @endpoint
    @idempotent
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    @idempotent
    def mark(self, path: str) -> int:
        begin_at(path)
        return os.getpid()


class Fragile(Actor):
    """Cannot be constructed."""

    def __init__(self) -> None:
        raise RuntimeError("no such luck")

    @endpoint
    def anything(self) -> None:
        """Nobody gets here."""


class Ward(Actor):
    """Is as well as a file says."""

    def __init__(self, path: str) -> None:
        self.path = path

    @endpoint
    def check(self) -> None:
        if os.path.exists(f"{self.path}.{os.getpid()}"):
            raise RuntimeError("not well")

    @endpoint
    @idempotent
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def hang(self) -> None:
        threading.Event().wait()


class Member(Actor):
    """Knows the other members of its replica."""

    def __init__(self) -> None:
        self.total = 0
        self.notes: list[str] = []

    @endpoint
    async def own(self) -> int:
        return 1 + context().actor_instance.rank.rank

    @endpoint
    async def meet(self, members: ActorMesh["Member"]) -> None:
        if context().actor_instance.rank.rank == 0:
            others = members.slice(procs=slice(1, None))
            self.total = 1 + sum(await others.own.call())

    @endpoint
    async def sum(self) -> int:
        return self.total

    @endpoint
    async def note(self, text: str) -> int:
        self.notes.append(text)
        return len(self.notes)

    @endpoint
    async def read(self) -> list[str]:
        return self.notes

    @endpoint
    async def fail(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    @idempotent
    async def break_off(self, path: str) -> int:
        """One process dies, the first time, and the others fail with it, as in a collective."""
        break_off_once(path, context().actor_instance.rank.rank)
        return os.getpid()

    @endpoint
    async def gpus(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


class Noter(Actor):
    """Sends notes to a service from another process."""

    @endpoint
    async def send(self, service: Service[Member], name: str, count: int) -> int:
        futures = [service.note.route(f"{name}{number}") for number in range(count)]
        return sum([1 for future in futures if len(await future) == 2])
