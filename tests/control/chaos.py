"""Random kills and respawns in a tree of actors under load.

    python -m tests.control.chaos --seconds 600

The script owns branches, each in a process of its own; a branch owns leaves, one in a process each, and replaces
those that die. Senders number what they send to a leaf and keep many calls in flight, while leaves and branches are
killed in every way. Every call has to end: in a value or in an error, within a bound. A leaf has to see the numbers of
a sender in order, without a gap and without a duplicate. Beside them a crowd of leaves is cast to down a tree, to all
and to slices, and straight, while its members die: the others have to see everything, in order, once, and to answer.
Prints a summary as JSON; the status is 1 where something was wrong.
"""

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from skipper import control
from skipper.control import (
    Actor,
    ActorError,
    ActorMesh,
    ControlError,
    DeadlineError,
    Future,
    MeshFailure,
    ResponseStream,
    SupervisionError,
    context,
    endpoint,
    this_host,
)
from skipper.control.model.settings import adopt, settings

BOUND_S = 20.0
"""Every wait ends within this; most take milliseconds. A machine that does a lot besides may need more."""

WINDOW = 40
"""Calls that a sender keeps in flight."""

BRANCHES = 2
LEAVES = 2
WAYS = ("SIGKILL", "SIGSEGV", "exit", "raise", "branch", "crowd", "crowd")

CROWD = 7
FANOUT = 2
CAST_WINDOW = 8
"""Casts to the crowd that are in flight."""


class Leaf(Actor):
    """Checks the numbers that its senders count with."""

    def __init__(self) -> None:
        self.last: dict[str, int] = {}

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def step(self, sender: str, number: int) -> tuple[int, str]:
        expected = self.last.get(sender, -1) + 1
        self.last[sender] = number
        return number, "" if number == expected else f"{sender}: {number} came where {expected} was to come"

    @endpoint
    def step_all(self, sender: str, numbers: list[int]) -> str:
        return self.step(sender, numbers[context().actor_instance.rank.rank])[1]

    @endpoint
    def end(self, how: str) -> None:
        if how == "exit":
            os._exit(9)
        if how == "raise":
            raise RuntimeError("chaos")
        os.kill(os.getpid(), signal.Signals[how])


class Branch(Actor):
    """Owns leaves and replaces those that fail."""

    def __init__(self) -> None:
        self.generation = 0
        self.leaves = [self._grow() for _ in range(LEAVES)]

    def _grow(self) -> ActorMesh[Any]:
        self.generation += 1
        return this_host().spawn_procs(name="leaf").spawn(f"leaf {self.generation}", Leaf)

    def __supervise__(self, failure: MeshFailure) -> bool:
        for place, leaf in enumerate(self.leaves):
            if leaf.name == failure.mesh_name:
                self.leaves[place] = self._grow()
        return True

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def leaf(self, place: int) -> ActorMesh[Any]:
        return self.leaves[place]


@dataclass(slots=True)
class Outcome:
    """What happened."""

    answered: int = 0
    refused: int = 0
    cast: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wrong(self, what: str) -> None:
        """Note a violation."""
        with self.lock:
            self.violations.append(what)


class Tree:
    """The branches as the script has them; a branch that dies is replaced. And the crowd."""

    def __init__(self) -> None:
        self.branches: list[ActorMesh[Any]] = [self._grow(number) for number in range(BRANCHES)]
        self.crowd: list[int] = []
        """Process ids of the members of the crowd that should be alive."""

    def _grow(self, number: int) -> ActorMesh[Any]:
        return this_host().spawn_procs(name="branch").spawn(f"branch {number}", Branch)

    def failed(self, failure: MeshFailure) -> None:
        """The script's fault hook: also told where a broadcast of the script came too late."""
        kind, _, number = failure.mesh_name.partition(" ")
        if kind == "branch":
            self.branches[int(number)] = self._grow(int(number))

    def leaf(self, branch: int, place: int) -> ActorMesh[Any]:
        """A leaf that lives, as far as its branch knows."""
        return self.branches[branch].leaf.call_one(place).get(BOUND_S)


class Sender(threading.Thread):
    """Keeps calls to one place of the tree in flight."""

    def __init__(self, name: str, tree: Tree, place: tuple[int, int], outcome: Outcome, over: threading.Event) -> None:
        super().__init__(name=name, daemon=True)
        self._tree = tree
        self._place = place
        self._outcome = outcome
        self._over = over
        self._life = 0

    def run(self) -> None:
        """Until it is over: find the leaf, send to it until it dies, begin again."""
        while not self._over.is_set():
            try:
                leaf = self._tree.leaf(*self._place)
            except DeadlineError as error:
                self._outcome.wrong(f"{self.name}: the branch did not answer: {error}")
            except ControlError:
                continue  # it has died, too: it is being replaced
            else:
                self._life += 1
                self._send_to(leaf, f"{self.name} life {self._life}")

    def _send_to(self, leaf: ActorMesh[Any], me: str) -> None:
        pending: deque[tuple[int, Future[Any]]] = deque()
        number, dead = 0, False
        while pending or not (dead or self._over.is_set()):
            while len(pending) < WINDOW and not (dead or self._over.is_set()):
                pending.append((number, leaf.step.call_one(me, number)))
                number += 1
            sent, future = pending.popleft()
            dead = not self._take(sent, future) or dead

    def _take(self, sent: int, future: Future[Any]) -> bool:
        """Wait for one call; whether it was answered."""
        try:
            answer, complaint = future.get(BOUND_S)
        except (DeadlineError, ActorError) as error:
            self._outcome.wrong(f"{self.name}: call {sent} ended in {type(error).__name__}: {error}")
            return False
        except ControlError:
            with self._outcome.lock:
                self._outcome.refused += 1
            return False
        if complaint or answer != sent:
            self._outcome.wrong(complaint or f"{self.name}: call {sent} was answered as {answer}")
        with self._outcome.lock:
            self._outcome.answered += 1
        return True


class Crier(threading.Thread):
    """Casts to a crowd, and to parts of it, until half of it is dead; then to another crowd."""

    def __init__(self, tree: Tree, outcome: Outcome, over: threading.Event) -> None:
        super().__init__(name="crier", daemon=True)
        self._tree = tree
        self._outcome = outcome
        self._over = over

    def run(self) -> None:
        """Until it is over."""
        life = 0
        while not self._over.is_set():
            life += 1
            procs = this_host().spawn_procs({"ranks": CROWD}, name="crowd")
            try:
                self._cry(procs.spawn("crowd", Leaf), life)
            finally:
                self._tree.crowd = []
                procs.stop().get(BOUND_S)

    def _cry(self, crowd: ActorMesh[Any], life: int) -> None:
        ranges = [range(CROWD), range(1, CROWD), range(CROWD - 1, CROWD), range(5)]
        parts = [(ranks, crowd.slice(ranks=slice(ranks.start, ranks.stop))) for ranks in ranges]
        dead: set[int] = set()
        self._tree.crowd = list(crowd.pid.call().get(BOUND_S))
        numbers = [0] * CROWD
        pending: deque[ResponseStream] = deque()
        turn = 0
        while pending or not (len(dead) > CROWD // 2 or self._over.is_set()):
            while len(pending) < CAST_WINDOW and not (len(dead) > CROWD // 2 or self._over.is_set()):
                ranks, part = parts[turn % len(parts)]
                turn += 1
                pending.append(part.step_all.stream(f"crier {life}", numbers))  # each rank looks at its own number
                for rank in ranks:
                    numbers[rank] += 1
                self._outcome.cast += 1
            dead |= self._take(pending.popleft())

    def _take(self, answers: ResponseStream) -> set[int]:
        """Wait for one cast; the ranks that are dead."""
        dead: set[int] = set()
        for answer in answers:
            try:
                complaint = answer.get(BOUND_S)
            except (DeadlineError, ActorError) as error:
                self._outcome.wrong(f"crowd: a cast ended in {type(error).__name__}: {error}")
            except SupervisionError as error:
                if error.failure is None or error.failure.rank is None:
                    self._outcome.wrong(f"crowd: nobody has died: {error}")
                else:
                    dead.add(error.failure.rank.rank)
            else:
                if complaint:
                    self._outcome.wrong(f"crowd: {complaint}")
        return dead


def wreak(tree: Tree, outcome: Outcome, chance: random.Random) -> None:
    """Kill something."""
    how = chance.choice(WAYS)
    branch, place = chance.randrange(BRANCHES), chance.randrange(LEAVES)
    try:
        if how == "branch":
            os.kill(tree.branches[branch].pid.call_one().get(BOUND_S), signal.SIGKILL)
        elif how == "crowd":
            if not tree.crowd:
                return
            os.kill(tree.crowd.pop(chance.randrange(len(tree.crowd))), signal.SIGKILL)
        elif how == "raise":
            tree.leaf(branch, place).end.broadcast(how)
        else:
            tree.leaf(branch, place).end.call_one(how)  # nobody looks at the answer
    except DeadlineError as error:
        outcome.wrong(f"nothing to kill within the bound: {error}")
    except (ControlError, ProcessLookupError, IndexError):
        return  # it was dead
    outcome.killed[how] += 1


def run(
    seconds: float,
    seed: int,
    *,
    pause_s: tuple[float, float] = (0.05, 0.6),
    is_enough: Callable[[Outcome], bool] = lambda outcome: True,
) -> Outcome:
    """Let it all happen for so long, and on until it is enough, at most twice the bound longer; ends the job."""
    outcome, over, chance = Outcome(), threading.Event(), random.Random(seed)
    others = set(psutil.Process().children(recursive=True))  # of other suites in the same run
    hook: Callable[[MeshFailure], None] = control.unhandled_fault_hook
    before = settings()
    control.configure(tree_threshold=4, tree_fanout=FANOUT)
    tree = Tree()
    control.unhandled_fault_hook = tree.failed
    senders = [
        Sender(f"sender {number}", tree, (number % BRANCHES, number // BRANCHES % LEAVES), outcome, over)
        for number in range(2 * BRANCHES * LEAVES)
    ]
    threads: list[threading.Thread] = [*senders, Crier(tree, outcome, over)]
    end = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    while time.monotonic() < end or not (is_enough(outcome) or time.monotonic() > end + 2 * BOUND_S):
        wreak(tree, outcome, chance)
        time.sleep(chance.uniform(*pause_s))
    over.set()
    for thread in threads:
        thread.join(2 * BOUND_S)
        if thread.is_alive():
            outcome.wrong(f"{thread.name} still waits")
    children = set(psutil.Process().children(recursive=True)) - others
    control.shutdown()
    control.unhandled_fault_hook = hook
    adopt(before)
    _, left = psutil.wait_procs(children, timeout=5)
    for process in left:
        outcome.wrong(f"{process} is left")
    return outcome


def main() -> int:
    """Run it as the command line says."""
    global BOUND_S
    parser = argparse.ArgumentParser(
        prog="python -m tests.control.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of what is killed when (default: %(default)s)")
    parser.add_argument("--bound", type=float, default=BOUND_S, help="of every wait, in s (default: %(default)s)")
    given = parser.parse_args()
    BOUND_S = given.bound
    outcome = run(given.seconds, given.seed)
    summary = {
        "answered": outcome.answered,
        "refused": outcome.refused,
        "cast": outcome.cast,
        "killed": dict(outcome.killed),
        "violations": outcome.violations[:20],
        "ok": not outcome.violations,
    }
    sys.stdout.write(json.dumps(summary, indent=2) + "\n")
    return 0 if not outcome.violations else 1


if __name__ == "__main__":
    sys.exit(main())
