"""A script that ends while a call waits in an actor: ``unwinding_script.py LOG``. Prints the pid of the actor."""

import asyncio
import atexit
import os
import sys

from skipper import control
from skipper.control import Actor, Channel, Port, concurrent_endpoint, this_host


def note(log: str, text: str) -> None:
    with open(log, "a") as file:
        file.write(text + "\n")


class Server(Actor):
    def __init__(self, log: str) -> None:
        self.log = log

    @concurrent_endpoint
    async def serve(self, begun: Port[int]) -> None:
        begun.send(os.getpid())
        atexit.register(note, self.log, "atexit")
        try:
            await asyncio.sleep(600)
        finally:
            note(self.log, "finally")

    async def __cleanup__(self, error: Exception | None) -> None:
        note(self.log, "cleanup")


if __name__ == "__main__":
    control.configure(exit_grace_s=3.0)
    port, receiver = Channel[int].open()
    serving = this_host().spawn_procs().spawn("server", Server, sys.argv[1]).serve.call_one(port)
    print(receiver.recv().get(20), flush=True)
