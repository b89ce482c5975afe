"""An actor that makes processes in all the ways that there are, and what has become of them."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import threading
import time

import psutil

from skipper.control import Actor, endpoint

SLEEP = ["sleep", "600"]


def _wait() -> None:
    while True:
        signal.pause()


def _with_offspring() -> None:
    subprocess.Popen(SLEEP, start_new_session=True)
    _wait()


def by_fork() -> None:
    """A child, its child, and that one's."""
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            os.fork()
        _wait()


def by_fork_twice() -> None:
    """A daemon as in the books: of another session, without a parent, with nothing in its environment."""
    if (pid := os.fork()) == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in range(256):
            with contextlib.suppress(OSError):
                os.close(number)
        os.execve("/bin/sleep", SLEEP, {})
    os.waitpid(pid, 0)


def by_subprocess() -> None:
    subprocess.Popen(SLEEP)


def by_shell() -> None:
    """One in the background, whose shell has ended."""
    subprocess.run("sleep 600 & trap '' TERM; true", shell=True, check=True, start_new_session=True)


def by_multiprocessing() -> None:
    context = multiprocessing.get_context("fork")
    context.Process(target=_with_offspring).start()
    context.Process(target=_wait, daemon=True).start()


def by_spawn() -> None:
    multiprocessing.get_context("spawn").Process(target=_wait, daemon=True).start()


WAYS = {by_fork: 3, by_fork_twice: 1, by_subprocess: 1, by_shell: 1, by_multiprocessing: 3, by_spawn: 2}
"""Each with how many processes it leaves; spawning makes a resource tracker, too."""


def descendants(pid: int) -> dict[int, str]:
    """The command lines of those of a worker: what is below its keeper, itself excepted."""
    keeper = psutil.Process(pid).parent()
    assert keeper is not None
    found = {}
    for process in keeper.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid != pid and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
    return found


class Family(Actor):
    """Has processes of its own."""

    @endpoint
    def make(self) -> tuple[int, list[int]]:
        """Make them, in a thread that ends; this process' id and theirs, once they are there."""
        for way in WAYS:
            thread = threading.Thread(target=way)
            thread.start()
            thread.join()
        deadline = time.monotonic() + 20
        while len(found := descendants(os.getpid())) < sum(WAYS.values()):
            assert time.monotonic() < deadline, found
            time.sleep(0.01)
        return os.getpid(), sorted(found)

    @endpoint
    def forget(self) -> int:
        """Make a process that loses its parent, and ends."""
        theirs, ours = os.pipe()
        if (pid := os.fork()) == 0:
            if os.fork():
                os._exit(0)
            os.write(ours, str(os.getpid()).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        return int(os.read(theirs, 20))

    @endpoint
    def has_children(self) -> bool:
        """Whether there is anybody that this process could wait for."""
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        return True
