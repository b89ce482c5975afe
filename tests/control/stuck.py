"""Actors that do not end when they are told to; no pytest here, so that processes which import it start quickly."""

import asyncio
import atexit
import threading
import time
from typing import Any

from skipper.control import Actor, ActorMesh, Port, concurrent_endpoint, context, endpoint

FOR_EVER_S = 600.0


def compute() -> None:
    """Something that Python code does for ever."""
    while True:
        sum(range(1000))


class Noting(Actor):
    """Writes into a file what happens to it."""

    def __init__(self, path: str = "", hangs: str = "") -> None:
        self.path = path
        self.hangs = hangs
        if hangs == "init computes":
            try:
                compute()
            finally:
                self.note("finally of init")
        if hangs == "init sleeps":
            time.sleep(FOR_EVER_S)

    def note(self, text: str) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text + "\n")


class Stuck(Noting):
    """The sync kind."""

    @endpoint
    def ping(self) -> str:
        return "pong"

    @endpoint
    def computes(self, begun: Port[str]) -> None:
        begun.send("")
        try:
            compute()
        finally:
            self.note("finally")

    @endpoint
    def sleeps(self, begun: Port[str]) -> None:
        begun.send("")
        time.sleep(FOR_EVER_S)

    @endpoint
    def waits(self, begun: Port[str]) -> None:
        other = context().proc.spawn("other", Stuck)
        other.ping.call_one().get()
        pending = other.sleeps.call_one(begun)
        try:
            pending.get()
        finally:
            self.note("finally")

    @endpoint
    def calls(self, begun: Port[str], other: "ActorMesh[Stuck]") -> None:
        begun.send("")
        while True:
            other.ping.call_one().get()

    @endpoint
    def begin_at_exit(self, what: Any) -> None:
        atexit.register(what)

    @endpoint
    def begin_a_thread(self) -> None:
        threading.Thread(target=compute, name="endless", daemon=False).start()

    @endpoint
    def stop_itself(self) -> None:
        context().actor_instance.stop()

    def __cleanup__(self, error: Exception | None) -> None:
        if self.hangs == "cleanup computes":
            try:
                compute()
            finally:
                self.note("finally of cleanup")
        if self.hangs == "cleanup sleeps":
            time.sleep(FOR_EVER_S)
        if self.path:
            self.note("cleanup")


class AsyncStuck(Noting):
    """The async kind."""

    @endpoint
    async def ping(self) -> str:
        return "pong"

    @endpoint
    async def waits(self, begun: Port[str]) -> None:
        await self.wait(begun)

    @concurrent_endpoint
    async def waits_beside(self, begun: Port[str]) -> None:
        await self.wait(begun)

    @endpoint
    async def computes(self, begun: Port[str]) -> None:
        begun.send("")
        try:
            compute()
        finally:
            self.note("finally")

    @endpoint
    async def sleeps(self, begun: Port[str]) -> None:
        begun.send("")
        time.sleep(FOR_EVER_S)  # noqa: ASYNC251  (that is the mistake)

    async def wait(self, begun: Port[str]) -> None:
        begun.send("")
        try:
            await asyncio.sleep(FOR_EVER_S)
        finally:
            self.note("finally")

    async def __cleanup__(self, error: Exception | None) -> None:
        if self.hangs == "cleanup waits":
            try:
                await asyncio.sleep(FOR_EVER_S)
            finally:
                self.note("finally of cleanup")
        if self.path:
            self.note("cleanup")


class Owner(Noting):
    """Owns another one of its kind, down to a leaf that does not clean up."""

    def __init__(self, path: str, depth: int) -> None:
        super().__init__(path)
        self.depth = depth
        here = context().proc
        if depth:
            self.owned: Any = here.spawn(f"level{depth - 1}", Owner, path, depth - 1)
        else:
            self.owned = here.spawn("leaf", Stuck, "", "cleanup sleeps")

    @endpoint
    def ready(self) -> None:
        if self.depth:
            self.owned.ready.call_one().get()
        else:
            self.owned.ping.call_one().get()

    def __cleanup__(self, error: Exception | None) -> None:
        self.note(f"cleanup {self.depth}")
