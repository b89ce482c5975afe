"""Actors of the tests of jobs."""

import os
import signal

from control import Actor, context, endpoint


class Worker(Actor):
    """Says who and where it is."""

    @endpoint
    def rank(self) -> int:
        return context().actor_instance.rank.rank

    @endpoint
    def say(self, text: str) -> None:
        print(text, flush=True)

    @endpoint
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def host_pid(self) -> int:
        return os.getppid()
