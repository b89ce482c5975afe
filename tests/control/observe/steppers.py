"""Actors with breakpoints."""

import asyncio
import os
import threading
from typing import Any

from skipper.control import Actor, endpoint, this_host
from tests.control.actors import Echo


class Stepper(Actor):
    """Stops in most of what it does."""

    @endpoint
    def double(self, number: int) -> int:
        value = number * 2
        breakpoint()
        value += 1
        return value

    @endpoint
    def wait_at(self, fifo: str) -> str:
        breakpoint()
        pipe = os.open(fifo, os.O_RDWR)
        said = os.read(pipe, 100).decode()
        os.close(pipe)
        return said

    @endpoint
    def ping(self) -> str:
        return "pong"

    @endpoint
    def on_a_thread(self) -> list[int]:
        seen: list[int] = []

        def work() -> None:
            number = 7
            breakpoint()
            seen.append(number)

        thread = threading.Thread(target=work, name="helper")
        thread.start()
        thread.join()
        return seen

    @endpoint
    def own_and_stop(self) -> None:
        self.owned: Any = this_host().spawn_procs(name="owned").spawn("owned", Echo)
        self.pid: int = self.owned.pid.call_one().get(20)
        breakpoint()
        self.pid = 0

    @endpoint
    def twice(self) -> int:
        first = 1
        breakpoint()
        second = first + 1
        breakpoint()
        return first + second


class AsyncStepper(Actor):
    """The async kind."""

    @endpoint
    async def double(self, number: int) -> int:
        value = number * 2
        breakpoint()
        value = await self.more(value)
        value += 1
        return value

    async def more(self, value: int) -> int:
        await asyncio.sleep(0)
        return value + 1
