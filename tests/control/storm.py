"""Faults of every kind, at random, over nested trees of actors, on a machine that is as busy as one likes.

    python -m tests.control.storm --faults 500 --load 20

The script owns branches, each in a process of its own; a branch owns leaves, one in a process each. Leaves make
children of every kind (forked, detached, by `multiprocessing`, by a shell, with a cleaned environment). Then one of
them is hit: by a signal, an exit, a freeze, a fork that returns into the runtime, an endpoint or an ``__init__``
that hangs.
Whoever waits has to be told by an error of the right type within the bound that is stated for the fault; what dies has
to take its children along; nothing else may die. Beside them bystanders are called all the time, one of which holds the
interpreter's lock for longer than the heartbeat: they have to live. Prints a summary as JSON; the status is 1 where
something was wrong.
"""

import argparse
import asyncio
import ctypes
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil

from skipper import control
from skipper.control import (
    Actor,
    ActorMesh,
    ControlError,
    Future,
    MeshFailure,
    ProcMesh,
    StopTimeoutError,
    SupervisionError,
    endpoint,
    this_host,
)
from skipper.control.model.settings import adopt, settings

HEARTBEAT_S = 4.0
STOP_S = 4.0
INIT_S = 4.0
SLACK_S = 20.0
"""What a busy machine may add to a stated bound."""
FOR_EVER_S = 3600.0
CHILDREN = ("fork", "detached", "multiprocessing", "spawned", "shell", "cleaned")
BYSTANDERS = 3


class Leaf(Actor):
    """Makes children, hangs, and ends in every way."""

    def __init__(self) -> None:
        self.processes: list[Any] = []

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def hang(self) -> None:
        time.sleep(FOR_EVER_S)

    @endpoint
    def hold_interpreter(self, seconds: int) -> int:
        ctypes.PyDLL(None).sleep(seconds)
        return os.getpid()

    @endpoint
    def bear(self, kind: str) -> list[int]:
        """Process ids of the children that were made."""
        if kind == "fork":
            pid = os.fork()
            if pid == 0:
                time.sleep(FOR_EVER_S)
            return [pid]
        if kind == "detached":
            return [_detach()]
        if kind in ("multiprocessing", "spawned"):
            context = multiprocessing.get_context("fork" if kind == "multiprocessing" else "spawn")
            process = context.Process(target=time.sleep, args=(FOR_EVER_S,), daemon=kind == "multiprocessing")
            process.start()
            self.processes.append(process)
            return [process.pid]
        environment = {"PATH": os.environ["PATH"]} if kind == "cleaned" else None
        shell = subprocess.Popen(
            ["setsid", "sh", "-c", "sleep 3600 & echo $!; exec sleep 3600"],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.processes.append(shell)
        assert shell.stdout is not None
        return [shell.pid, int(shell.stdout.readline())]

    @endpoint
    def fork_and_return(self) -> int:
        """The child goes on into the runtime, as the parent does."""
        return os.fork()

    @endpoint
    def end(self, how: str) -> None:
        if how == "exit":
            os._exit(9)
        if how == "exit of a thread":
            threading.Thread(target=os._exit, args=(8,)).start()
            time.sleep(FOR_EVER_S)
        if how == "SystemExit":
            sys.exit(3)
        os.kill(os.getpid(), signal.Signals[how])
        time.sleep(FOR_EVER_S)


def _detach() -> int:
    """A grandchild in a session of its own, whose parent has ended."""
    theirs, ours = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if (pid := os.fork()) == 0:
            time.sleep(FOR_EVER_S)
        os.write(ours, f"{pid}\n".encode())
        os._exit(0)
    os.close(ours)
    with os.fdopen(theirs) as pipe:
        return int(pipe.readline())


class Stuck(Actor):
    """Never begins."""

    def __init__(self) -> None:
        time.sleep(FOR_EVER_S)

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Coroutine(Actor):
    """Waits for what never comes, as coroutines do."""

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def hang(self) -> None:
        await asyncio.sleep(FOR_EVER_S)


class Branch(Actor):
    """Owns leaves; takes note of their failures."""

    def __init__(self) -> None:
        self.owned: dict[str, ProcMesh] = {}

    def __supervise__(self, failure: MeshFailure) -> bool:
        return True

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def grow(self, name: str, cls: type[Actor]) -> ActorMesh[Any]:
        procs = self.owned[name] = this_host().spawn_procs(name=name)
        return procs.spawn(name, cls)

    @endpoint
    def hang(self) -> None:
        time.sleep(FOR_EVER_S)

    @endpoint
    def prune(self, name: str) -> None:
        self.owned.pop(name).stop().get(STOP_S + SLACK_S)


@dataclass(slots=True)
class Outcome:
    """What happened."""

    faults: Counter[str] = field(default_factory=Counter)
    children: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    slowest_s: dict[str, float] = field(default_factory=dict)
    """How much longer than the stated bound it took at most, by fault; negative: it was earlier."""
    violations: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wrong(self, what: str) -> None:
        """Note a violation."""
        with self.lock:
            self.violations.append(what)

    def took(self, fault: str, seconds: float, bound_s: float) -> None:
        """Note how long somebody waited for an error that has to come within a bound."""
        with self.lock:
            self.slowest_s[fault] = max(self.slowest_s.get(fault, -bound_s), seconds - bound_s)
        if seconds > bound_s + SLACK_S:
            self.wrong(f"{fault}: told after {seconds:.1f} s, the bound is {bound_s:g} s")


class Plot(threading.Thread):
    """One branch and its leaves, and what is done to them.

    Args:
        number: of the plot.
        faults: names of those to come, taken from by all plots.
    """

    def __init__(self, number: int, faults: list[str], chance: random.Random, outcome: Outcome) -> None:
        super().__init__(name=f"plot {number}", daemon=True)
        self._number = number
        self._faults = faults
        self._chance = chance
        self._outcome = outcome
        self._generation = 0
        self.home: ProcMesh | None = None
        self._branch: ActorMesh[Any] | None = None
        self.names: set[str] = set()
        """Of the meshes to which something has been done."""

    def run(self) -> None:
        """As long as there are faults."""
        while True:
            try:
                fault = self._faults.pop()
            except IndexError:
                break
            self._outcome.faults[fault] += 1
            try:
                self._do(fault)
            except Exception as error:  # noqa: BLE001  (whatever it is: it was not expected)
                self._outcome.wrong(f"{fault}: {type(error).__name__}: {error}")
                self._branch = None  # whatever is left of it
        if self.home is not None:
            self.home.stop().get(STOP_S + SLACK_S)

    def _do(self, fault: str) -> None:
        branch = self._living_branch()
        self._generation += 1
        name = f"leaf {self._number}.{self._generation}"
        cls = {"init hangs": Stuck, "coroutine hangs": Coroutine}.get(fault, Leaf)
        leaf = branch.grow.call_one(name, cls).get(SLACK_S * 2)
        if fault == "init hangs":
            self.names.add(name)
            self._expect(fault, leaf.pid.call_one(), INIT_S)
            branch.prune.call_one(name).get(STOP_S + SLACK_S)
            return
        doomed = [psutil.Process(leaf.pid.call_one().get(SLACK_S))]
        if cls is Leaf:
            kind = self._chance.choice(CHILDREN)
            self._outcome.children[kind] += 1
            doomed += [psutil.Process(pid) for pid in leaf.bear.call_one(kind).get(SLACK_S)]
        self.names.add(name)
        self._strike(fault, leaf, doomed)
        if not fault.startswith("branch"):
            with_process = branch.prune.call_one(name)
            with_process.get(STOP_S + SLACK_S)
        self._expect_gone(fault, doomed)

    def _living_branch(self) -> ActorMesh[Any]:
        if self._branch is None:
            self.home = this_host().spawn_procs(name=f"branch {self._number}")
            self._branch = self.home.spawn(f"branch {self._number}.{self._generation}", Branch)
        return self._branch

    def _strike(self, fault: str, leaf: ActorMesh[Any], doomed: list[psutil.Process]) -> None:
        """Do it, and see that whoever waits is told."""
        if fault in ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGTERM"):
            waiting = leaf.hang.call_one()
            doomed[0].send_signal(signal.Signals[fault])
            self._expect(fault, waiting, 0.0)
        elif fault == "SIGSTOP":
            waiting = leaf.hang.call_one()
            doomed[0].suspend()
            self._expect(fault, waiting, HEARTBEAT_S)
        elif fault in ("hang", "coroutine hangs"):
            waiting, stopped = leaf.hang.call_one(), leaf.stop()
            self._expect(fault, stopped, STOP_S, StopTimeoutError)
            self._expect(fault, waiting, 0.0)
        elif fault == "fork and return":
            forked = leaf.fork_and_return.call_one().get(SLACK_S)
            if forked == 0:
                self._outcome.wrong(f"{fault}: the child answered")
            leaf.pid.call_one().get(SLACK_S)
        elif fault == "stop":
            leaf.stop().get(STOP_S + SLACK_S)
        elif fault.startswith("branch"):
            self._strike_branch(fault, leaf, doomed)
        else:
            self._expect(fault, leaf.end.call_one(fault), 0.0)

    def _strike_branch(self, fault: str, leaf: ActorMesh[Any], doomed: list[psutil.Process]) -> None:
        branch = self._living_branch()
        process = psutil.Process(branch.pid.call_one().get(SLACK_S))
        waiting = [branch.hang.call_one(), leaf.hang.call_one()]
        self.names.add(branch.name)
        doomed.append(process)
        process.send_signal(signal.Signals[fault.removeprefix("branch ")])
        for future in waiting:
            self._expect(fault, future, HEARTBEAT_S if fault.endswith("STOP") else 0.0)
        self._branch = None

    def _expect(
        self, fault: str, future: Future[Any], bound_s: float, error_type: type[ControlError] = SupervisionError
    ) -> None:
        """Wait for a future that has to end in an error."""
        began = time.monotonic()
        try:
            value = future.get(bound_s + 3 * SLACK_S)
        except ControlError as error:
            if not isinstance(error, error_type):
                self._outcome.wrong(f"{fault}: {type(error).__name__}: {error}")
        else:
            self._outcome.wrong(f"{fault}: answered with {value!r}")
        self._outcome.took(fault, time.monotonic() - began, bound_s)

    def _expect_gone(self, fault: str, doomed: list[psutil.Process]) -> None:
        _, left = psutil.wait_procs(doomed, timeout=SLACK_S)
        for process in left:
            self._outcome.wrong(f"{fault}: {process} is left")
            process.kill()


FAULTS = (
    *("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGTERM", "SIGSTOP", "exit", "exit of a thread", "SystemExit"),
    *("fork and return", "stop", "hang", "coroutine hangs", "init hangs", "branch SIGKILL", "branch SIGSTOP"),
)


class Bystander(threading.Thread):
    """Calls an actor that nothing is done to, for as long as the storm lasts."""

    def __init__(self, number: int, outcome: Outcome, over: threading.Event) -> None:
        super().__init__(name=f"bystander {number}", daemon=True)
        self._holds = number == 0
        self._outcome = outcome
        self._over = over
        self.procs = this_host().spawn_procs(name=self.name)
        self._actor: ActorMesh[Any] = self.procs.spawn(self.name, Leaf)
        self._pid = self._actor.pid.call_one().get(SLACK_S * 2)

    def run(self) -> None:
        """Until it is over."""
        while not self._over.wait(0.2):
            call = (
                self._actor.hold_interpreter.call_one(int(2 * HEARTBEAT_S))
                if self._holds
                else self._actor.pid.call_one()
            )
            try:
                pid = call.get(2 * HEARTBEAT_S + 3 * SLACK_S)
            except ControlError as error:
                self._outcome.wrong(f"{self.name}, which is healthy: {type(error).__name__}: {error}")
                return
            if pid != self._pid:
                self._outcome.wrong(f"{self.name} answered from {pid} instead of {self._pid}")
            with self._outcome.lock:
                self._outcome.answered += 1


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Keep the processors busy."""
    hogs = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
        for hog in hogs:
            hog.wait()


@contextmanager
def _bounds() -> Iterator[None]:
    before = settings()
    control.configure(
        heartbeat_s=HEARTBEAT_S,
        stop_timeout_s=STOP_S,
        init_timeout_s=INIT_S,
        connect_timeout_s=120.0,
        exit_grace_s=STOP_S,
        preload=["tests.control.storm"],
    )
    try:
        yield
    finally:
        adopt(before)


def run(faults: int, seed: int, *, plots: int = 4) -> Outcome:
    """Let so many faults happen, each kind as often as the others, in an order of chance; ends the job."""
    outcome, over, chance = Outcome(), threading.Event(), random.Random(seed)
    to_come = [FAULTS[number % len(FAULTS)] for number in range(faults)]
    chance.shuffle(to_come)
    others = set(psutil.Process().children(recursive=True))
    hook: Callable[[MeshFailure], None] = control.unhandled_fault_hook
    unheard: list[MeshFailure] = []
    control.unhandled_fault_hook = unheard.append
    with _bounds():
        bystanders = [Bystander(number, outcome, over) for number in range(BYSTANDERS)]
        threads = [Plot(number, to_come, random.Random(seed + number), outcome) for number in range(plots)]
        for thread in (*bystanders, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        over.set()
        for bystander in bystanders:
            bystander.join()
        struck = set().union(*(plot.names for plot in threads))
        for failure in unheard:
            if failure.mesh_name not in struck and not failure.mesh_name.startswith("branch"):
                outcome.wrong(f"{failure.mesh_name!r} failed, to which nothing was done: {failure}")
        control.shutdown()
    control.unhandled_fault_hook = hook
    _, left = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - others, timeout=SLACK_S)
    for process in left:
        outcome.wrong(f"{process} is left")
    return outcome


def main() -> int:
    """Run it as the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.control.storm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=500, help="how many (default: %(default)s)")
    parser.add_argument("--load", type=int, default=0, help="busy processes beside it (default: %(default)s)")
    parser.add_argument("--plots", type=int, default=4, help="trees at a time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of what happens when (default: %(default)s)")
    given = parser.parse_args()
    began = time.monotonic()
    with load(given.load):
        outcome = run(given.faults, given.seed, plots=given.plots)
    summary = {
        "faults": dict(sorted(outcome.faults.items())),
        "children": dict(sorted(outcome.children.items())),
        "bystanders_answered": outcome.answered,
        "longer_than_the_bound_s": {name: round(over, 2) for name, over in sorted(outcome.slowest_s.items())},
        "wall_s": round(time.monotonic() - began),
        "violations": outcome.violations[:20],
        "ok": not outcome.violations,
    }
    sys.stdout.write(json.dumps(summary, indent=2) + "\n")
    return 0 if not outcome.violations else 1


if __name__ == "__main__":
    sys.exit(main())
