"""`Schedule`: what a job does in a few seconds of virtual time and what befalls it meanwhile, all chosen by a seed."""

from __future__ import annotations

import gc
import random
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from skipper.control import Actor, ActorMesh, Channel, MeshFailure, Port, ProcMesh, context, endpoint, this_host
from skipper.control.api.mesh import HostMesh
from skipper.control.model import settings as bounds
from skipper.control.model.errors import ControlError, LinkError, SupervisionError
from skipper.control.wire.process_ref import ProcessRef
from tests.simulation import ledger as ledgers
from tests.simulation import memory as memories
from tests.simulation import processes, services, stores
from tests.simulation import world as worlds
from tests.simulation.ledger import Ledger, Owned, Sayer
from tests.simulation.memory import Memories
from tests.simulation.network import Ether, VirtualStream, Weather
from tests.simulation.processes import Cluster, SimulatedProcess
from tests.simulation.services import Served
from tests.simulation.stores import Part, Stored
from tests.simulation.world import BEGIN_S, ProcessKilledError, World

QUIET_HEARTBEAT_S = 600.0
"""Where nothing falls silent, signs of life would only cost time."""
HEARTBEAT_S = 8.0
SURVIVED = 0.5
"""The part of the heartbeat's bound for which everybody may be silent and be taken for alive."""
_AFTER_S = 0.02
"""How long after something is said a fault comes, on average."""
_LOOK_S = 2.0
SERVING = 0.25
"""The part of the jobs that have a service."""
STORING = 0.25
"""The part of the jobs that have a store."""
_STORE_S = 4.0
"""A store is used for so long, with the time that it takes to begin."""
BOUND_S = 90.0
"""Everything ends within this, after the last that happens to the job."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one schedule.

    Attributes:
        seed: of it.
        wrong: the invariants that it broke.
        steps: how many things happened.
        answers: how many calls ended.
        errors: how many of them in an error.
        faults: what befell the job.
        processes: how many it had.
        digest: see `World`.
    """

    seed: int
    wrong: tuple[str, ...]
    steps: int
    answers: int
    errors: int
    faults: tuple[str, ...]
    processes: int
    digest: int


class Leaf(Actor):
    """Looks at the numbers that its senders count with, and speaks to its mesh itself."""

    def __init__(self) -> None:
        here = context().actor_instance
        self.me = f"{here.name}[{here.rank.rank}]"
        self.sayer: Sayer | None = None
        self.told: dict[str, int] = {}

    @endpoint
    def step(self, sender: str, runs: list[int]) -> tuple[int, int]:
        rank = context().actor_instance.rank.rank
        number = ledgers.number_in(runs, rank)
        ledgers.current().came(self.me, sender, number)
        return rank, number

    @endpoint
    def tell(self, port: Port[tuple[int, int]], channel: str) -> tuple[int, int]:
        rank = context().actor_instance.rank.rank
        number = self.told[channel] = self.told.get(channel, -1) + 1
        port.send((rank, number))
        return rank, number

    @endpoint
    def speak(self, mesh: ActorMesh[Any], first: int, end: int) -> None:
        if self.sayer is None:
            self.sayer = Sayer(ledgers.current(), f"{self.me} itself", ledgers.here(), mesh)
        self.sayer.cast(range(first, end))


class Branch(Actor):
    """Owns a leaf in a process that it has launched itself, and has another one made when that has died."""

    def __init__(self) -> None:
        self.owned = Owned(ledgers.here())
        ledgers.current().owned.append(self.owned)
        self.sayer = self._grow()

    def _grow(self) -> Sayer:
        here = self.owned.owner
        name = f"leaf {len(self.owned.meshes)} of {here}"
        leaf = this_host().spawn_procs({"p": 1}, name="leaf").spawn(name, Leaf)
        self.owned.meshes.append(leaf)
        return Sayer(ledgers.current(), f"{here} to {name}", here, leaf)

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.owned.told.append(failure.mesh_name)
        if failure.mesh_name == self.owned.meshes[-1].name:
            self.sayer = self._grow()
        return True

    @endpoint
    def speak(self, awaits: bool) -> int:
        (self.sayer.cast if awaits else self.sayer.broadcast)(range(1))
        return len(self.owned.meshes)


class Schedule:
    """One schedule, to be played once.

    Args:
        seed: decides everything.
        hosts: how many hosts take part beside that of the script; None: as the seed says.
        trace: see `World`.
    """

    def __init__(self, seed: int, *, hosts: int | None = None, trace: Callable[[str], object] | None = None) -> None:
        self.seed = seed
        self.world = world = World(seed, trace)
        self.chance = chance = world.chance
        worlds.play(world)
        self.is_silent = chance.random() < 0.25
        """Whether hosts and processes may fall silent."""
        hosts = chance.choice((0, 0, 1, 2, 3)) if hosts is None else hosts
        self.heartbeat_s = HEARTBEAT_S if self.is_silent else QUIET_HEARTBEAT_S
        bounds.adopt(
            bounds.Settings(
                heartbeat_s=self.heartbeat_s,
                unresponsive_s=4 * self.heartbeat_s,
                connect_timeout_s=30.0,
                stop_timeout_s=20.0,
                tree_threshold=chance.choice((1, 2, 3)),
                tree_fanout=chance.choice((2, 2, 3)),
                max_unhandled=256,
            )
        )
        weather = Weather(late=chance.choice((0.0, 0.02, 0.1)), late_s=chance.choice((0.05, 0.5)))
        self.cluster = Cluster(world, Ether(world, weather), hosts)
        self.ledger = Ledger(world, self.cluster)
        ledgers.play(self.ledger)
        self.ledger.memories = Memories(world, self.cluster)
        self.cluster.root.on_failure = self.ledger.told
        self.faults: list[str] = []
        self.crowds: list[ActorMesh[Any]] = []
        self.sayers: list[Sayer] = []
        self.channels: list[_Told] = []
        self.branches: list[ActorMesh[Any]] = []
        self.procs: list[ProcMesh] = []
        self.stops = chance.random() < 0.5
        """Whether everything is stopped in the end."""
        self.unheard_until_s = BEGIN_S
        """Until when hosts are cut off from each other, or one that has vanished may not be missed yet."""
        self.until_s = BEGIN_S + chance.choice((1.0, 3.0, 5.0))
        self.service_chance = random.Random(f"service {seed}")
        self.is_serving = self.service_chance.random() < SERVING
        self.store_chance = random.Random(f"store {seed}")
        self.is_storing = self.store_chance.random() < STORING
        if self.is_storing:
            self.until_s = max(self.until_s, BEGIN_S + _STORE_S)

    def play(self) -> Outcome:
        """Let it all happen."""
        world, cluster = self.world, self.cluster
        world.at(BEGIN_S, cluster.script, self._begin)
        if self.is_serving:
            world.at(BEGIN_S, cluster.script, self._serve)
        if self.is_storing:
            world.at(BEGIN_S, cluster.script, self._store)
        acts = [BEGIN_S + self.chance.random() * (self.until_s - BEGIN_S) for _ in range(self.chance.randrange(20, 60))]
        for when_s in acts:
            world.at(when_s, cluster.script, self._act)
        for _ in range(self.chance.choice((0, 1, 1, 2, 3, 5))):
            # Most of them while something is on its way.
            world.at(self.chance.choice(acts) + self.chance.expovariate(1 / _AFTER_S), None, self._befall)
        world.run(self.until_s)
        bound_s = world.now_s + BOUND_S + (6 * self.heartbeat_s if self.is_silent else 0)
        quiet = 0
        while world.now_s < bound_s and quiet < 2:  # what is not missing any more does not come twice, either
            world.run(world.now_s + _LOOK_S)
            quiet = 0 if self._is_silent() or any(self._missing()) else quiet + 1
        for what in self._missing():
            world.violation(what)
        if self.stops and not world.wrong:
            self._stop_all()
        return Outcome(
            self.seed,
            tuple(world.wrong),
            world.steps,
            self.ledger.answers,
            self.ledger.errors,
            tuple(self.faults),
            len(cluster.processes),
            world.digest,
        )

    def _is_silent(self) -> bool:
        """Whether some process cannot answer for some time. If nobody waits for it, its loss is not known yet."""
        now_s = self.world.now_s
        return self.unheard_until_s > now_s or any(
            each.stalled_until_s > now_s and not each.is_dead for each in self.cluster.processes
        )

    def close(self) -> None:
        """Let go of everything."""
        worlds.forget_tasks()
        stores.forget()
        self.ledger.memories.close_all()
        worlds.play(None)
        ledgers.play(None)

    def _stop_all(self) -> None:
        """Stop everything in good order; nobody is told of a failure by that, and nothing is left."""
        world, script = self.world, self.cluster.script
        told = sum(self.cluster.root.told.values())
        ends: list[Any] = []
        self.ledger.is_stopping = True
        world.at(world.now_s, script, self._stop, ends)
        bound_s = world.now_s + 2 * bounds.settings().stop_timeout_s
        while world.now_s < bound_s and any(self._left(ends)):
            world.run(world.now_s + _LOOK_S)
        for what in self._left(ends):
            world.violation(what)
        if sum(self.cluster.root.told.values()) != told:
            world.violation("the script was told of failures by a stop in good order")

    def _stop(self, ends: list[Any]) -> None:
        """Stop what there is, a store first: its processes are its own."""
        served = [] if self.ledger.served is None else [self.ledger.served.service]
        procs = self.procs if self.ledger.stored is None else [*self.procs, *self.ledger.stored.procs]

        def stop(_: object) -> None:
            ends.extend(each.stop() for each in (*served, *procs))

        if self.ledger.stored is None:
            stop(None)
        else:
            self.ledger.stored.teardown().add_done_callback(stop)

    def _left(self, ends: list[Any]) -> Iterator[str]:
        """What has not been stopped."""
        if not ends or not all(end.done() for end in ends):
            yield "a stop of processes has not ended"
        for process in self.cluster.processes:
            is_over = process.is_dead or self.ledger.is_lost(self.cluster.script, process.id)
            if process.parent is not None and not is_over:
                yield f"{process} lives on behind the stop"

    def _missing(self) -> Iterator[str]:
        yield from self.ledger.missing()
        for told in self.channels:
            yield from told.missing()

    # What the script does

    def _begin(self) -> None:
        self._spawn_crowd()

    def _serve(self) -> None:
        chance = self.service_chance
        hosts = self._all_hosts() if self.cluster.hosts and chance.random() < 0.7 else None
        served = self.ledger.served = Served(self.ledger, chance, hosts)
        procs = (hosts or this_host()).spawn_procs(name=services.CALLER)
        self.procs.append(procs)
        served.begin(procs)
        for _ in range(chance.randrange(5, 30)):
            when_s = BEGIN_S + chance.random() * (self.until_s - BEGIN_S)
            self.world.at(when_s, self.cluster.script, served.act)
        for is_broken in (services.is_call, services.is_within_replica):
            if chance.random() < 0.5:
                when_s = BEGIN_S + chance.random() * (self.until_s - BEGIN_S)
                self.world.at(when_s, None, self._break_within_service, is_broken)

    def _store(self) -> None:
        chance = self.store_chance
        hosts = self._all_hosts() if self.cluster.hosts and chance.random() < 0.7 else None
        stored = self.ledger.stored = Stored(self.ledger, chance, hosts)
        acts = [BEGIN_S + chance.uniform(0.3, 1.0) * (self.until_s - BEGIN_S) for _ in range(chance.randrange(10, 50))]
        for when_s in acts:
            self.world.at(when_s, self.cluster.script, stored.act)
        for part, likelihood in (
            (Part.CONTROLLER, 0.6),
            (Part.CONTROLLER, 0.6),
            (Part.VOLUME, 0.4),
            (Part.CLIENT, 0.3),
        ):
            if chance.random() < likelihood:
                when_s = chance.choice(acts) + chance.expovariate(1 / _AFTER_S)
                self.world.at(when_s, None, self._kill_of_store, stored, part)

    def _spawn_crowd(self) -> None:
        hosts = self._hosts()
        each = self.chance.randrange(1, 4 if hosts is not None else 8)
        if hosts is not None:
            procs = hosts.spawn_procs({"g": each}, name="crowd")
            flat = procs.flatten("p")
        else:
            procs = flat = this_host().spawn_procs({"p": each}, name="crowd")
        self.procs.append(procs)
        crowd = flat.spawn(f"crowd {len(self.crowds)}", Leaf)
        self.crowds.append(crowd)
        self.sayers.append(Sayer(self.ledger, f"script to {crowd.name}", self.cluster.script, crowd))

    def _hosts(self) -> HostMesh | None:
        if not any(not host.is_dead for host in self.cluster.hosts) or self.chance.random() < 0.3:
            return None
        return self._all_hosts()

    def _all_hosts(self) -> HostMesh:
        alive = [host for host in self.cluster.hosts if not host.is_dead]
        script = self.cluster.script.process
        refs = tuple(ProcessRef(h.id, h.process.me.address, h.name, script.me) for h in alive)
        return HostMesh(refs)

    def _act(self) -> None:
        chance = self.chance
        at = chance.randrange(len(self.crowds))
        crowd, sayer = self.crowds[at], self.sayers[at]
        first = chance.choice((0, 0, 0, chance.randrange(crowd.size)))
        ranks = (
            range(first, chance.randrange(first, crowd.size) + 1) if chance.random() < 0.3 else range(first, crowd.size)
        )
        what = chance.random()
        try:
            if what < 0.35:
                sayer.cast(ranks)
            elif what < 0.5:
                sayer.broadcast(ranks)
            elif what < 0.7:
                sayer.call(first)
            elif what < 0.82:
                crowd.slice(p=first).speak.broadcast(crowd, ranks.start, ranks.stop)
            elif what < 0.88:
                self._tell(crowd, ranks)
            elif what < 0.96:
                self._grow()
            elif len(self.crowds) < 3:
                self._spawn_crowd()
        except ControlError as error:
            self.world.violation(f"the script: {type(error).__name__}: {error}")

    def _grow(self) -> None:
        """Have a branch, on any host, speak to its leaf."""
        if len(self.branches) < 2:
            hosts = self._hosts()
            host = this_host() if hosts is None else hosts.slice(hosts=slice(1))
            procs = host.spawn_procs(name="branch")
            self.procs.append(procs)
            branch = procs.flatten("p").spawn(f"branch {len(self.branches)}", Branch)
            self.branches.append(branch)
            self.ledger.meshes.append(branch)
        branch = self.chance.choice(self.branches)
        if self.chance.random() < 0.5:
            branch.speak.broadcast(False)
        else:
            answer = branch.speak.call_one(True)
            self.ledger.expect(self.cluster.script, answer, lambda answer: self._grown(answer, branch))

    def _grown(self, answer: Any, branch: ActorMesh[Any]) -> None:
        try:
            answer.get(0)
        except SupervisionError as error:
            if self.ledger.rank_of(error, branch, range(1), self.cluster.script) is not None:
                self.ledger.excuse(self.cluster.script, branch.root_members[0].id, str(error))

    def _tell(self, crowd: ActorMesh[Any], ranks: range) -> None:
        told = next((each for each in self.channels if each.crowd is crowd), None)
        if told is None:
            told = _Told(self.ledger, self.cluster.script, crowd, f"channel {len(self.channels)}")
            self.channels.append(told)
        told.ask(ranks)

    # What befalls the job

    def _befall(self) -> None:
        chance, cluster = self.chance, self.cluster
        alive = [each for each in cluster.processes if not (each.is_dead or self._is_spared(each))]
        mortal = [each for each in alive if each is not cluster.script]
        if not mortal:
            return
        hosts = [host for host in cluster.hosts if not host.is_dead]
        what = chance.random()
        victim = chance.choice(mortal)
        if what < 0.4:
            self._note("kill", f"{victim} is killed")
            victim.die()
        elif what < 0.7:
            self._break()
        elif what < 0.8 or not self.is_silent:
            if self.ledger.stored is not None:  # which has to survive that, too
                victim = chance.choice([each for each in cluster.processes if not each.is_dead])
            seconds = chance.random() * (SURVIVED * self.heartbeat_s if self.is_silent else 3.0)
            self._note("stall", f"{victim} does nothing for {seconds:.3f} s")
            victim.stall(seconds)
        elif what < 0.87 and hosts:
            host = chance.choice(hosts)
            self._note("vanish", f"{host} vanishes")
            host.die(silently=True)
            self.unheard_until_s = max(self.unheard_until_s, self.world.now_s + self.heartbeat_s)
        elif what < 0.95 and hosts:
            self._part(chance.choice(hosts).ip)
        else:
            seconds = 3 * self.heartbeat_s
            self._note("freeze", f"{victim} freezes for {seconds:.3f} s")
            victim.stall(seconds)
            for other in cluster.processes:
                self._hurt(victim, other)

    def _note(self, kind: str, what: str) -> None:
        self.faults.append(kind)
        self.world.tell(what)

    def _hurt(self, one: SimulatedProcess, other: SimulatedProcess) -> None:
        self.ledger.hurt.add(frozenset((one.id, other.id)))

    def _break(self) -> None:
        streams = [stream for stream in self.cluster.ether.streams if stream.other_owner]
        spared = [each for each in streams if self._is_spared(each.owner) or self._is_spared(each.other_owner)]
        self._break_one([stream for stream in streams if stream not in spared], self.chance)

    def _is_spared(self, process: SimulatedProcess | None) -> bool:
        stored = self.ledger.stored
        return stored is not None and process is not None and stored.spares(process)

    def _kill_of_store(self, stored: Stored, part: Part) -> None:
        victim = stored.victim(part)
        if victim is not None and not victim.is_dead:
            self._note("kill", f"{victim}, of the store, is killed")
            victim.die()

    def _break_within_service(self, is_chosen: Callable[[VirtualStream], bool]) -> None:
        """Break all such streams of one process."""
        streams = [stream for stream in self.cluster.ether.streams if is_chosen(stream)]
        if streams:
            owner = self.service_chance.choice(streams).owner
            for stream in streams:
                if stream.owner is owner:
                    self._break_one([stream], self.service_chance)

    def _break_one(self, streams: list[VirtualStream], chance: random.Random) -> None:
        if not streams:
            return
        stream = chance.choice(streams)
        assert stream.other_owner is not None
        self._note("break", f"the stream between {stream.owner} and {stream.other_owner} breaks")
        self._hurt(stream.owner, stream.other_owner)
        stream.break_off()

    def _part(self, ip: str) -> None:
        others = sorted({each.ip for each in self.cluster.processes} - {ip})
        there = others if self.chance.random() < 0.5 else [self.chance.choice(others)]
        is_short = self.chance.random() < 0.5
        seconds = self.heartbeat_s * (self.chance.random() * SURVIVED if is_short else 3.0)
        self._note("partition", f"{ip} is cut off from {', '.join(there)} for {seconds:.3f} s")
        self.unheard_until_s = max(self.unheard_until_s, self.world.now_s + seconds)
        for other in there:
            self.cluster.ether.cut(ip, other)
            self.world.at(self.world.now_s + seconds, None, self.cluster.ether.heal, ip, other)
        if not is_short:
            cut_off = [each for each in self.cluster.processes if each.ip == ip]
            beyond = set(there)
            for another in self.cluster.processes:
                if another.ip in beyond:
                    for one in cut_off:
                        self._hurt(one, another)


@dataclass(slots=True, eq=False)
class _Told:
    """What the members of a crowd tell the script by a port, beside their answers."""

    ledger: Ledger
    script: SimulatedProcess
    crowd: ActorMesh[Any]
    name: str
    port: Port[Any] = field(init=False)
    receiver: Any = field(init=False)
    value: Any = field(init=False)
    last: dict[int, int] = field(default_factory=dict)
    is_over: bool = False

    def __post_init__(self) -> None:
        self.port, self.receiver = Channel[Any].open()
        self.port.link(self.crowd)
        self._listen()

    def ask(self, ranks: range) -> None:
        """Have some of them tell something, and answer."""
        part = self.crowd.slice(p=slice(ranks.start, ranks.stop))
        for future in part.tell.stream(self.port, self.name):
            self.ledger.expect(self.script, future, lambda answer: self._answered(answer, ranks))

    def _answered(self, answer: Any, ranks: range) -> None:
        try:
            rank, number = answer.get(0)
        except ControlError as error:
            if not isinstance(error, SupervisionError):
                self.ledger.world.violation(f"{self.name}: {type(error).__name__}: {error}")
            elif (rank := self.ledger.rank_of(error, self.crowd, ranks, self.script)) is not None:
                self.ledger.excuse(self.script, self.crowd.root_members[rank].id, f"{self.name}: {error}")
            return
        if self.last.get(rank, -1) < number:
            self.ledger.world.violation(f"{self.name}: rank {rank} answered {number} before its value has come")

    def _listen(self) -> None:
        self.value = self.receiver.recv()  # which is forgotten where nobody holds it
        self.value.add_done_callback(self._came)

    def _came(self, value: Any) -> None:
        try:
            rank, number = value.get(0)
        except LinkError as error:
            self.is_over = True
            for member in () if self.ledger.is_stopping else self.crowd.root_members:
                self.ledger.excuse(self.script, member.id, f"{self.name}: {error}")
            return
        if number != self.last.get(rank, -1) + 1:
            self.ledger.world.violation(f"{self.name}: {number} of rank {rank} came behind {self.last.get(rank, -1)}")
        self.last[rank] = number
        self._listen()

    def missing(self) -> Iterator[str]:
        """Whoever is linked to actors that are all dead is told so."""
        members = [self.ledger.cluster.by_id.get(member.id) for member in self.crowd.root_members]
        if not self.is_over and all(member is None or member.is_dead for member in members):
            yield f"{self.name} still waits, though all that it is linked to are dead"


def play(seed: int, *, hosts: int | None = None, trace: Callable[[str], object] | None = None) -> Outcome:
    """Play the schedule of a seed."""
    schedule = Schedule(seed, hosts=hosts, trace=trace)
    try:
        return schedule.play()
    except (Exception, ProcessKilledError) as error:  # noqa: BLE001  (a fault of the simulation is to be seen, too)
        wrong = f"the simulation failed: {''.join(traceback.format_exception(error)[-6:])}"
        return Outcome(seed, (wrong,), schedule.world.steps, 0, 0, (), 0, 0)
    finally:
        schedule.close()


def begin() -> None:
    """Make this process of the operating system one that plays schedules."""
    import logging

    import skipper.control.runtime.assembly
    import skipper.control.wire.transport  # noqa: F401

    logging.getLogger("skipper").setLevel(logging.CRITICAL)
    worlds.install()
    processes.install()
    services.install()
    memories.install()
    stores.install()
    gc.disable()  # `program` has schedules played by processes that end soon
    gc.collect()
    gc.freeze()
