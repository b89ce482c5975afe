"""`Ledger`: what was sent, what came of it, and which ends are to be expected: the invariants of a schedule.

Most are those of `tests.control.chaos`. Every call ends, in a value or in an error that names somebody who is lost.
What one process says to an actor arrives in order, without a gap and once; whoever lives gets everything. What an actor
has sent to a port is there before its answer. Who is linked to the dead is told so. An owner is told of each death
once, and what it has lost ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skipper.control.model.errors import BackpressureError, SupervisionError
from skipper.control.model.failure import FailureKind
from skipper.control.runtime import running

if TYPE_CHECKING:
    from skipper.control import ActorMesh, Future, MeshFailure
    from tests.simulation.memory import Memories
    from tests.simulation.processes import Cluster, SimulatedProcess
    from tests.simulation.services import Served
    from tests.simulation.stores import Stored
    from tests.simulation.world import World


class Sayer:
    """One sender: it numbers what it says to each member of a mesh.

    Attributes:
        name: of the sender, unique.
        owner: its process.
        numbers: by rank in the mesh, the number of what is said next.
    """

    def __init__(self, ledger: Ledger, name: str, owner: SimulatedProcess, mesh: ActorMesh[Any]) -> None:
        self.ledger = ledger
        self.name = name
        self.owner = owner
        self.mesh = mesh
        self.numbers = [0] * mesh.size
        self.is_broken = False
        """Whether something was refused for want of room, so that what was sent is not known."""
        self._parts: dict[range, ActorMesh[Any]] = {}
        """What it has spoken to, by the ranks."""
        ledger.sayers.append(self)

    def cast(self, ranks: range) -> None:
        """Say something to some ranks, and wait for what each answers."""
        self._send(ranks, lambda runs: list(self._part(ranks).step.stream(self.name, runs)))

    def call(self, rank: int) -> None:
        """Say something to one."""
        one = range(rank, rank + 1)
        self._send(one, lambda runs: [self._part(one).step.call_one(self.name, runs)])

    def broadcast(self, ranks: range) -> None:
        """Say something to some ranks that nobody answers."""
        self._send(ranks, lambda runs: (self._part(ranks).step.broadcast(self.name, runs), [])[1])

    def _part(self, ranks: range) -> ActorMesh[Any]:
        part = self._parts.get(ranks)
        if part is None:
            part = self._parts[ranks] = self.mesh.slice(p=slice(ranks.start, ranks.stop))
        return part

    def _send(self, ranks: range, send: Any) -> None:
        if self.is_broken:
            return
        said = list(self.numbers)
        try:
            futures = send(runs_of(said, ranks))
        except BackpressureError:
            self.is_broken = True
            return
        for rank in ranks:
            self.numbers[rank] += 1
        answered: set[int] = set()
        for future in futures:
            self.ledger.expect(self.owner, future, lambda answer: self._answered(answer, ranks, said, answered))

    def _answered(self, answer: Future[Any], ranks: range, said: list[int], answered: set[int]) -> None:
        try:
            rank, number = answer.get(0)
        except SupervisionError as error:
            rank = self.ledger.rank_of(error, self.mesh, ranks, self.owner)
            if rank is None:
                return
            self.ledger.excuse(self.owner, self.mesh.root_members[rank].id, f"{self.name}: {error}")
        except Exception as error:  # noqa: BLE001  (nothing else may end a call)
            self.ledger.world.violation(f"{self.name}: a call ended in {type(error).__name__}: {error}")
            return
        else:
            if number != said[rank]:
                self.ledger.world.violation(f"{self.name}: {said[rank]} to rank {rank} was answered as {number}")
        if rank not in ranks or rank in answered:
            self.ledger.world.violation(f"{self.name}: rank {rank} has answered twice, or was not asked")
        answered.add(rank)


def runs_of(numbers: list[int], ranks: range) -> list[int]:
    """The numbers of some ranks, each with the rank behind the last in a row that has it: most have the same."""
    runs: list[int] = []
    for number, alike in itertools.groupby(ranks, numbers.__getitem__):
        *_, last = alike
        runs += (last + 1, number)
    return runs


def number_in(runs: list[int], rank: int) -> int:
    """The number of a rank among those."""
    return next(number for end, number in zip(runs[::2], runs[1::2], strict=True) if rank < end)


@dataclass(slots=True)
class Owned:
    """The meshes of one actor each, in a process of its own, that one owner makes, one after another.

    Attributes:
        owner: its process.
        meshes: the last of them lives.
        told: the names of those of which the owner was told that they have failed.
    """

    owner: SimulatedProcess
    meshes: list[ActorMesh[Any]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)


class Ledger:
    """What one schedule has to account for."""

    def __init__(self, world: World, cluster: Cluster) -> None:
        self.world = world
        self.cluster = cluster
        self.sayers: list[Sayer] = []
        self.meshes: list[ActorMesh[Any]] = []
        """Other meshes of the script."""
        self.open: dict[int, tuple[SimulatedProcess, Any]] = {}
        """Futures that have not ended."""
        self.heard: dict[tuple[str, str], int] = {}
        """By actor and sender, the number of the last thing that has come."""
        self.actors: dict[str, SimulatedProcess] = {}
        """The processes of actors that live, by the id of the actor."""
        self.hurt: set[frozenset[str]] = set()
        """Pairs of processes that may take each other for lost though both live."""
        self.owned: list[Owned] = []
        """What others than the script own."""
        self.served: Served | None = None
        """A service, where the job has one."""
        self.memories: Memories
        """The memory of stores, and what their processes have open."""
        self.stored: Stored | None = None
        """A store, where the job has one."""
        self.is_stopping = False
        """Whether everything is stopped in good order."""
        self.answers = self.errors = 0
        self._futures = 0

    def expect(self, owner: SimulatedProcess, future: Future[Any], then: Any) -> None:
        """A future is to end."""
        self._futures += 1
        key = self._futures
        self.open[key] = owner, future

        def ended(answer: Future[Any]) -> None:
            del self.open[key]
            self.answers += 1
            then(answer)

        future.add_done_callback(ended)

    def came(self, actor: str, sender: str, number: int) -> None:
        """An actor handles what a sender has said."""
        expected = self.heard.get((actor, sender), -1) + 1
        self.heard[actor, sender] = number
        if number != expected:
            self.world.violation(f"{actor}: {sender}'s {number} came where {expected} was to come")

    def rank_of(self, error: SupervisionError, mesh: ActorMesh[Any], ranks: range, who: SimulatedProcess) -> int | None:
        """The rank that an error names; None where it names none.

        It may do so if somebody is lost: whoever has never heard of an actor does not know its rank.
        """
        self.errors += 1
        failure = error.failure
        if failure is not None and failure.rank is not None:
            return failure.rank.rank
        if not any(self.is_lost(who, mesh.root_members[rank].id) for rank in ranks):
            self.world.violation(f"an error names nobody: {error}")
        return None

    def is_lost(self, who: SimulatedProcess, process_id: str) -> bool:
        """Whether a process may take another for lost.

        Every actor here is owned by the script, and ends without it; and what the script gives up it cuts off. Whoever
        loses a host loses its processes, and a link that one end gives up has ended for the other.
        """
        other = self.cluster.by_id.get(process_id)
        script = self.cluster.script
        if other is None:
            return True
        return any(
            self._is_out_of_reach(*pair) for pair in ((who, other), (other, who), (script, other), (script, who))
        )

    def _is_out_of_reach(self, who: SimulatedProcess, other: SimulatedProcess) -> bool:
        above = self.above(other)
        ends = [other] if above is None else [other, above]
        if who is not other and any(end.is_dead for end in ends):
            return True
        pairs = [(who, end) for end in ends] + ([] if above is None else [(above, other)])
        return any(frozenset((one.id, another.id)) in self.hurt for one, another in pairs)

    def above(self, process: SimulatedProcess) -> SimulatedProcess | None:
        """Who tells others that a process has ended."""
        if process.is_host:
            return self.cluster.script
        return process.parent

    def excuse(self, who: SimulatedProcess, process_id: str, what: str) -> None:
        """An error is in order if the process that it names may be taken for lost."""
        if not self.is_lost(who, process_id):
            self.world.violation(f"nobody has died: {what}")

    # At the end

    def missing(self) -> Iterator[str]:
        """What has not come about and has to, or has come about twice."""
        for owner, future in self.open.values():
            if not owner.is_dead:
                pending = future.pending
                yield f"{owner} still waits: {pending.describe() if pending is not None else 'for something'}"
        for sayer in self.sayers:
            if not (sayer.owner.is_dead or sayer.is_broken):
                yield from self._not_come(sayer)
        if self.served is not None:
            yield from self.served.missing()
        if self.stored is not None:
            yield from self.stored.missing()
        yield from self._not_told()
        yield from self._not_ended()
        for owned in self.owned:
            if not self.is_lost(self.cluster.script, owned.owner.id):
                yield from self._not_replaced(owned)

    def _not_ended(self) -> Iterator[str]:
        """What the script has lost ends, as long as its launcher is there to end it."""
        script = self.cluster.script
        for process in self.cluster.processes:
            above = self.above(process)
            if process.is_dead or above is None or not above.is_host or self._is_out_of_reach(script, above):
                continue
            if self.cluster.root.has_lost(process.id):
                yield f"{process} lives on, though the script has lost it"

    def _not_replaced(self, owned: Owned) -> Iterator[str]:
        """An owner is told once of each mesh that it has lost, and makes another."""
        *before, last = owned.meshes
        for mesh in before:
            if (count := owned.told.count(mesh.name)) != 1:
                yield f"{owned.owner} was told {count} times that it has lost {mesh.name}"
        member = self.cluster.by_id.get(last.root_members[0].id)
        if member is None or member.is_dead:
            yield f"{owned.owner} has not replaced {last.name}"

    def _not_come(self, sayer: Sayer) -> Iterator[str]:
        for rank, member in enumerate(sayer.mesh.root_members):
            actor = f"{sayer.mesh.name}[{rank}]"
            got, said = self.heard.get((actor, sayer.name), -1) + 1, sayer.numbers[rank]
            if got != said and not self.is_lost(sayer.owner, member.id):
                yield f"{actor} has got {got} of {said} from {sayer.name}"

    def _not_told(self) -> Iterator[str]:
        """The script is told once of each mesh of actors that has lost a member."""
        root = self.cluster.root
        for key, count in root.told.items():
            if count > 1:
                yield f"the script was told {count} times that {key[0]} has lost {key[1]}"
        for mesh in {mesh.uid: mesh for mesh in (*self.meshes, *(sayer.mesh for sayer in self.sayers))}.values():
            if root.meshes.has_spawned(mesh.uid):
                for member in mesh.root_members:
                    process = self.cluster.by_id.get(member.id)
                    if process is not None and process.is_dead and not root.told[mesh.name, member.id]:
                        yield f"the script was not told that {mesh.name} has lost {member.name}"

    def told(self, failure: MeshFailure) -> None:
        """The script is told of a failure."""
        if failure.kind is FailureKind.UNDELIVERED:
            # To a process that has lost the script before it was told of its actor; it is about to end.
            members = [member for sayer in self.sayers for member in sayer.mesh.root_members]
            if not any(self.is_lost(self.cluster.script, member.id) for member in members):
                self.world.violation(f"the script was told: {failure.headline()}")
            return
        source = failure.root_cause().source
        self.cluster.root.note_told(failure.mesh_name, source)
        self.excuse(self.cluster.script, source, f"the script was told: {failure.headline()}")


def current() -> Ledger:
    """The ledger of the schedule that is played."""
    assert _current is not None
    return _current


def play(ledger: Ledger | None) -> None:
    """Have this be the ledger from now on."""
    global _current
    _current = ledger


def here() -> SimulatedProcess:
    """The process that runs."""
    process: Any = running.current()
    return current().cluster.by_id[process.me.id]


_current: Ledger | None = None
