"""Actors of the tests of jobs."""

import os
import signal

import psutil

from skipper.control import Actor, context, endpoint


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
        """Of the process that stands for the job on this host."""
        (member,) = (one for one in psutil.Process().parents() if "member.py" in " ".join(one.cmdline()))
        return int(member.pid)

    @endpoint
    def started_by(self) -> str:
        """The command line of the guard or the fork server above this process' keeper."""
        return " ".join(psutil.Process().parents()[1].cmdline())
