"""Actors for the tests of services."""

import os
import threading
import time
from pathlib import Path

from control import Actor, ActorMesh, Port, context, current_rank, endpoint, idempotent
from control.services import Service


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
