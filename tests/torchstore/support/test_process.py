"""Identity and death of real processes."""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace

from skipper.torchstore.support.process import DeathNotice, ProcessId, this_process


def sleeper() -> subprocess.Popen[bytes]:
    """A process that lives until its stdin is closed."""
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)


def identity(pid: int) -> ProcessId:
    with open(f"/proc/{pid}/stat", "rb") as file:
        start = int(file.read().rsplit(b")", 1)[1].split()[19])
    return replace(this_process(), pid=pid, start=start)


def test_this_process_is_alive_and_local() -> None:
    me = this_process()
    assert (me.pid, me.is_local, me.is_alive()) == (os.getpid(), True, True)
    assert str(me) == f"process {os.getpid()}"


def test_a_zombie_and_a_reused_pid_are_not_alive() -> None:
    child = sleeper()
    who = identity(child.pid)
    assert who.is_alive()
    assert not replace(who, start=who.start + 1).is_alive()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, but not yet collected
    assert not who.is_alive()
    child.communicate()
    assert not who.is_alive()


def test_a_process_of_another_host_counts_as_alive() -> None:
    elsewhere = ProcessId("another host", 1, 1)
    assert elsewhere.is_alive()
    assert not elsewhere.is_local


async def test_a_death_is_reported_once_and_at_once() -> None:
    child = sleeper()
    who = identity(child.pid)
    deaths: list[ProcessId] = []
    reported = asyncio.Event()

    def note(process: ProcessId) -> None:
        deaths.append(process)
        reported.set()

    watch = DeathNotice(note)
    watch.add(who)
    watch.add(who)
    watch.add(ProcessId("another host", child.pid, 1))
    child.kill()
    async with asyncio.timeout(20):
        await reported.wait()
    child.communicate()
    watch.close()
    assert deaths == [who]


async def test_a_process_that_was_dead_before_it_was_watched_is_reported_too() -> None:
    child = sleeper()
    who = identity(child.pid)
    child.kill()
    child.communicate()
    reported: asyncio.Queue[ProcessId] = asyncio.Queue()
    watch = DeathNotice(reported.put_nowait)
    watch.add(who)
    watch.add(replace(this_process(), start=1))  # our own pid, given to a process that started at another time
    async with asyncio.timeout(20):
        assert await reported.get() == who
        assert (await reported.get()).start == 1
    watch.close()


async def test_nothing_is_reported_after_close() -> None:
    unwatched, watched = sleeper(), sleeper()
    deaths: list[ProcessId] = []
    closed, still_open = DeathNotice(deaths.append), DeathNotice(deaths.append)
    closed.add(identity(unwatched.pid))
    closed.close()
    still_open.add(who := identity(watched.pid))
    for child in (unwatched, watched):
        child.kill()
        child.communicate()
    async with asyncio.timeout(20):
        while not deaths:
            await asyncio.to_thread(os.getpid)  # a way around the event loop and back
    still_open.close()
    assert deaths == [who]
