"""`Stored`: a store of the job, its trainers and readers, and the invariants of its versions.

Controllers, their journal, volumes, leases, arenas, seals, repeated requests and steps of groups are the product's.
`memory` simulates what they are built on. The invariants: an acknowledged step is not lost while its memory exists. A
read finds one step in a version. Each step is one version. Every operation ends. At the end, no lease and no memory is
kept without a user. If the store has a journal, the deaths of controllers cause no error.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from skipper.control import Actor, concurrent_endpoint, current_rank, endpoint, this_host, this_proc
from skipper.control.model.errors import BackpressureError, ControlError
from skipper.dataplane.errors import DataplaneError
from skipper.torchstore.algebra.layout import Box, Piece
from skipper.torchstore.algebra.manifest import WHOLE, Binding, Manifest, TensorItem
from skipper.torchstore.clients.direct_put import DirectMemory
from skipper.torchstore.clients.membership import Membership
from skipper.torchstore.clients.publish import Publisher
from skipper.torchstore.clients.remote import RemoteStore, explain_transfer
from skipper.torchstore.clients.requests import StateDictPut
from skipper.torchstore.clients.snapshot_put import SnapshotPuts
from skipper.torchstore.clients.transfer import Failover
from skipper.torchstore.controller import actor as controller_actor
from skipper.torchstore.controller import volumes as controller_volumes
from skipper.torchstore.controller.actor import StoreController
from skipper.torchstore.errors import KeyNotFoundError, SourceChangedError, StoreError, StoreTimeoutError
from skipper.torchstore.peers.volume import StorageVolume
from skipper.torchstore.protocol.messages import (
    NEWEST,
    Grant,
    Publication,
    Published,
    Selector,
    Share,
    StoreSettings,
    Wanted,
)
from skipper.torchstore.protocol.origin import ALONE, Origin, Turn
from skipper.torchstore.protocol.strategy import TorchStoreStrategy
from skipper.torchstore.support import deadlines
from skipper.torchstore.support.deadlines import ask
from skipper.torchstore.support.process import this_process
from skipper.torchstore.support.records import Cost
from skipper.torchstore.tensors.packing import Packed
from tests.simulation import ledger as ledgers
from tests.simulation.memory import VirtualMemory, VirtualWrite, identity_of

if TYPE_CHECKING:
    import random

    from skipper.control import ActorMesh, Future
    from skipper.control.api.mesh import HostMesh
    from skipper.torchstore.clients.arenas import ArenaPool
    from skipper.torchstore.controller.state import StoreState
    from tests.simulation.ledger import Ledger
    from tests.simulation.processes import SimulatedProcess

_NAME = "weights"
_TIMEOUT_S = 60.0
_WAIT_S = 5.0
"""For a version that may not come."""
_CRASHES = 0.1
"""In some stores a controller dies after this part of the requests, within `_ANSWER_S` and perhaps before it has
answered."""
_ANSWER_S = 300e-6
_PATIENCE_S = 2.0
_GROUP = "readers"
_TOGETHER = "together"
"""The key that all trainers put as a group."""


class Part(Enum):
    """A part of a store that can die."""

    CONTROLLER = auto()
    VOLUME = auto()
    CLIENT = auto()


class ByRank(TorchStoreStrategy):
    """A client writes to the volume of its rank, or to the first one again."""

    @classmethod
    def get_volume_id(cls) -> str:
        return str(current_rank().rank)

    def choose(self, volumes: tuple[str, ...]) -> str:
        return volumes[current_rank().rank % len(volumes)]


class NotedController(StoreController):
    """The store's controller; the schedule knows all of them."""

    def __init__(self, store_name: str) -> None:
        super().__init__(store_name)
        _current().controllers.append((ledgers.here(), self))

    def _once(self, *arguments: Any) -> Any:
        try:
            return super()._once(*arguments)
        finally:
            _current().recorded(ledgers.here())


class NotedVolume(StorageVolume):
    """A volume; the schedule knows all of them."""

    def __init__(self, id_func: Callable[[], str], limit: int | None) -> None:
        super().__init__(id_func, limit)
        _current().volumes.append((ledgers.here(), self))


class Puts(SnapshotPuts):
    """Snapshot puts whose bytes are the number of a step."""

    async def _write(self, arena: Any, packed: Any, cost: Cost, timeout: float) -> None:
        write: Any = VirtualWrite(arena.binding.buffers[0], packed.tensors["step"])
        await self.arenas.write(arena, write, packed.nbytes, cost, timeout, fresh=True)


class _Client(Actor):
    """A process that uses the store."""

    def __init__(self, entrance: ActorMesh[Any]) -> None:
        self._entrance = entrance
        self._remote: RemoteStore | None = None

    def _is_over(self) -> bool:
        return ledgers.here() in _current().failed

    async def _connect(self) -> RemoteStore:
        if self._remote is None:
            info = await ask(self._entrance.info.call_one(this_process(), this_proc()), _TIMEOUT_S)
            self._remote = self._remote or RemoteStore(_NAME, self._entrance, info)
        return self._remote


class Trainer(_Client):
    """Puts one step after another.

    Args:
        entrance: the actor with the store's name.
        size: how many trainers there are.
        is_direct: whether its own steps are read where they are.
    """

    def __init__(self, entrance: ActorMesh[Any], size: int, is_direct: bool) -> None:
        super().__init__(entrance)
        self._rank = current_rank().rank
        self._origin = Origin("trainers", self._rank, size)
        self._is_direct = is_direct
        self._publisher: Publisher | None = None
        self._steps: dict[str, int] = {}
        self._weights: Packed | None = None
        """The memory of direct puts."""

    async def _publishing(self) -> Publisher:
        remote = await self._connect()
        if self._publisher is None:
            self._publisher = Publisher(remote)
            self._publisher.snapshots = Puts(remote, self._publisher._retire)
            _current().pools.append((ledgers.here(), self._publisher.snapshots.arenas))
        return self._publisher

    def _next(self, key: str) -> int:
        step = self._steps[key] = self._steps.get(key, 0) + 1
        _current().begun(key, step)
        return step

    @endpoint
    async def put(self) -> None:
        """A step of its own."""
        if self._is_over():
            return
        key = f"own {self._rank}"
        with _current().operation("put", key):
            publisher = await self._publishing()
            if self._is_direct:
                await self._put_direct(publisher, key)
            else:
                step = self._next(key)
                published = await _publish(publisher, lambda cost: _copy(publisher, key, "w", step, cost))
                _current().acknowledged(key, published.version, step)

    async def _put_direct(self, publisher: Publisher, key: str) -> None:
        if self._weights is None:
            memory: Any = VirtualMemory()
            self._weights = _packed("w", {}, (memory,))
            _current().direct_keys.add(key)
        else:  # as `LocalClient.fence`
            await (await self._connect()).fence(key, close=True, timeout=_TIMEOUT_S)
            publisher.withdraw(key)
        weights: Any = self._weights
        step = self._next(key)
        await weights.storages[0].write(step)
        put = StateDictPut({}, key, mode="direct")
        published = await _publish(publisher, lambda cost: publisher._direct.write(put, weights, cost))
        _current().acknowledged(key, published.version, step)

    @endpoint
    async def share(self) -> None:
        """Its part of a step of all trainers."""
        if self._is_over():
            return
        with _current().operation("share", _TOGETHER):
            publisher = await self._publishing()
            member, name = Membership(self._origin), f"w{self._rank}"
            turn = publisher._put_counts.next(_TOGETHER, member, None, alone=False)
            step = self._next(_TOGETHER)
            with publisher._put_counts.counted(member, {_TOGETHER: turn}):
                published = await _publish(publisher, lambda cost: _copy(publisher, _TOGETHER, name, step, cost, turn))
            if published.ready:
                _current().acknowledged(_TOGETHER, published.version, step)

    @endpoint
    async def note(self) -> None:
        """A small value."""
        if self._is_over():
            return
        key = f"small {self._rank}"
        with _current().operation("note", key):
            remote = await self._connect()
            step = self._next(key)
            version = await remote.put_inline(key, str(step).encode(), _TIMEOUT_S)
            _current().acknowledged(key, version, step)

    @endpoint
    async def take_back(self, is_deleted: bool) -> None:
        """Delete its own key, or make the oldest version that is kept the newest again."""
        key = f"own {self._rank}"
        if self._is_over() or self._is_direct or not _current().steps.get(key):
            return
        with _current().operation("take_back", key) as operation, _current().changed(key):
            operation.known = _current().steps[key]
            publisher, remote = await self._publishing(), await self._connect()
            if is_deleted:
                await remote.delete((key,), missing_ok=False, timeout=_TIMEOUT_S)
                publisher.forget((key,))
                _current().steps[key] = 0
                return
            versions = await remote.ask(lambda to: to.versions.call_one(key), _TIMEOUT_S)
            if not versions:
                raise KeyNotFoundError(key)
            client, oldest = remote.info.client, versions[0]
            await remote.ask_once(lambda to, request: to.rollback.call_one(client, key, oldest, request), _TIMEOUT_S)
            _current().steps[key] = 1  # at least


class Reader(_Client):
    """Reads what trainers have put."""

    def __init__(self, entrance: ActorMesh[Any]) -> None:
        super().__init__(entrance)
        self._seen: dict[str, int] = {}
        self._copies: dict[str, Packed] = {}
        self._offers = DirectMemory()

    @endpoint
    async def serve(self, key: str) -> None:
        """Read the newest version from the trainer, or from another reader, and offer the copy to others."""
        if self._is_over():
            return
        with _current().operation("serve", key) as operation:
            remote = await self._connect()
            _current().look(operation)
            wanted = Wanted(key, NEWEST, (), _GROUP, _PATIENCE_S)
            (grant,) = grants = await remote.acquire_batch((wanted,), _TIMEOUT_S)
            try:
                self._offers.withdraw(key)
                found, failed = await self._read_or_borrow(remote, key, grant)
                share = await self._offer(key, max(found)) if len(found) == 1 else None
                remote.finish(grant, share, failed=failed)
                grants = ()
            except SourceChangedError:
                return
            finally:
                remote.release(grants)
            _current().was_read(operation, grant.version, found)

    async def _read_or_borrow(self, remote: RemoteStore, key: str, grant: Grant) -> tuple[set[int], bool]:
        """What is found, and whether another reader's copy could not be read."""
        if grant.peer_copy is not None:
            try:
                return await self._read_share(
                    remote, key, grant.version, grant.peer_copy, lambda holders: holders[0]
                ), False
            except (StoreError, DataplaneError):
                pass
        return await self._read(remote, key, grant), grant.peer_copy is not None

    async def _offer(self, key: str, step: int) -> Share:
        packed: Any = self._copies.get(key)
        if packed is None:
            memory: Any = VirtualMemory()
            packed = self._copies[key] = _packed("w", {}, (memory,))
        await packed.storages[0].write(step)
        binding, generation = self._offers.publish(key, packed)
        return Share(packed.manifest, binding, generation, this_process())

    @concurrent_endpoint
    async def get(self, key: str, waits: bool) -> None:
        """Read the newest version, or wait for the next one."""
        if self._is_over():
            return
        seen = self._seen.get(key, 0)
        with _current().operation("get", key, waits=waits) as operation:
            remote = await self._connect()
            _current().look(operation)
            selector = Selector(newer_than=seen) if waits else NEWEST
            while True:  # as `Fetcher.get_state_dict`
                grant = await remote.acquire(key, selector, (), _WAIT_S if waits else _TIMEOUT_S)
                try:
                    found = await self._read(remote, key, grant)
                except SourceChangedError:
                    selector = Selector(newer_than=grant.version)
                    continue
                finally:
                    remote.release((grant,))
                break
            self._seen[key] = max(self._seen.get(key, 0), grant.version)
            _current().was_read(operation, grant.version, found)

    async def _read(self, remote: RemoteStore, key: str, grant: Grant) -> set[int]:
        """All that is found in a version: the number of one step."""
        if grant.inline:
            return {int(grant.inline)}
        failover = Failover(remote)

        async def read(choose: Any, _end: float) -> set[int]:
            found: set[int] = set()
            for share in grant.shares:
                found |= await self._read_share(remote, key, grant.version, share, choose)
            return found

        if not any(share.copies for share in grant.shares):
            return await read(failover.choose(), 0.0)
        parts = [{holder.volume for holder in _holders(share)} for share in grant.shares]
        return await failover.read(parts, time.perf_counter() + _TIMEOUT_S, read)

    async def _read_share(self, remote: RemoteStore, key: str, version: int, share: Share, choose: Any) -> set[int]:
        binding = choose(_holders(share))
        is_direct = binding.mode == "direct"
        owner = share.writer if is_direct else remote.info.processes[binding.volume]

        async def check_seal() -> None:
            for generation in await binding.seal.memory.read() if is_direct else ():
                if generation != share.generation:
                    raise SourceChangedError(key, version, f"generation {generation}, not {share.generation}")

        try:
            await check_seal()
            found = await binding.buffers[0].memory.read()
            await check_seal()
        except DataplaneError as error:
            explain_transfer(error, key, version, [(binding, owner)])
        return set(found)


@dataclass(slots=True, eq=False)
class Operation:
    """What a client does.

    Attributes:
        client: the process that does it.
        known: the step that was acknowledged before a read.
        waits: whether it waits for a version that may not come.
        changes: how often the key had been taken back before a read.
    """

    client: SimulatedProcess
    what: str
    key: str
    waits: bool
    known: int = 0
    changes: int = 0


class Stored:
    """The store, and what has become of what was put there.

    Args:
        ledger: of the schedule.
        chance: decides what varies; it is not the one of the schedule, which stays the same without a store.
        hosts: volumes and clients run there; None: on the script's own host.

    Attributes:
        copies: how many volumes hold each part.
        direct_keys: keys whose versions are in the memory of their trainer.
        controllers: all controllers, also dead ones, with their processes; the first one has the store's name.
        volumes: all volumes, with their processes.
        pools: the arenas of all trainers, with their processes.
        failed: clients that have got an error. They do nothing more.
        is_spared: whether the only faults are deaths of clients, and of controllers that have a successor.
        steps: by key, the last step that was acknowledged.
    """

    def __init__(self, ledger: Ledger, chance: random.Random, hosts: HostMesh | None) -> None:
        self.ledger = ledger
        self.chance = chance
        self.controllers: list[tuple[SimulatedProcess, NotedController]] = []
        self.volumes: list[tuple[SimulatedProcess, NotedVolume]] = []
        self.pools: list[tuple[SimulatedProcess, ArenaPool]] = []
        self.direct_keys: set[str] = set()
        self.failed: set[SimulatedProcess] = set()
        self.steps: dict[str, int] = {}
        self.has_journal = chance.random() < 0.7
        self.is_spared = chance.random() < 0.5
        self._versions: dict[tuple[str, int], int] = {}
        """The steps that were acknowledged as these versions."""
        self._begun: dict[str, int] = {}
        self._changes: Counter[str] = Counter()
        """By key, how often a deletion or a rollback has begun or ended."""
        self._open: dict[Operation, None] = {}
        self._is_ready = False
        self._crashes = chance.choice((0, 0, 1, 2))
        number = chance.randint(1, 3)
        self.copies = chance.randint(1, min(number, 2))
        trainers_size = chance.randint(1, 2)
        place = this_host() if hosts is None or self.is_spared else hosts
        has_mesh = chance.random() < 0.5
        self.procs = [this_host().spawn_procs({"p": 1}, name="store")]
        mesh = place.spawn_procs({"v": number}, name="volume").flatten("v") if has_mesh else None
        number = number if mesh is None else mesh.size
        trainers = place.spawn_procs({"t": trainers_size}, name="trainer").flatten("t")
        readers = place.spawn_procs({"r": chance.randint(1, 2)}, name="reader").flatten("r")
        self.procs += [trainers, readers] if mesh is None else [trainers, readers, mesh]
        self.entrance = self.procs[0].spawn(f"torchstore/{_NAME}", NotedController, _NAME)
        settings = StoreSettings(chance.randint(1, 3), copies=self.copies, journal=self.has_journal)
        begun = self.entrance.init.call_one(number, ByRank(), mesh, None, settings)
        self._trainers = trainers.spawn("trainers", Trainer, self.entrance, trainers.size, chance.random() < 0.4)
        self._readers = readers.spawn("readers", Reader, self.entrance)
        ledger.meshes += [self.entrance, self._trainers, self._readers]
        ledger.expect(ledger.cluster.script, begun, self._initialized)

    def _initialized(self, begun: Future[None]) -> None:
        try:
            begun.get(0)
        except ControlError as error:
            has_lost_one = any(part.is_dead for part in self._parts())
            if not (has_lost_one or self._may_fail(self.ledger.cluster.script)):
                self.ledger.world.violation(f"the store has not begun: {type(error).__name__}: {error}")
        else:
            self._is_ready = True

    def act(self) -> None:
        """Have somebody use the store; in the script."""
        if not self._is_ready:
            return
        chance, trainer = self.chance, self.chance.randrange(self._trainers.size)
        one = self._trainers.slice(t=slice(trainer, trainer + 1))
        what = chance.random()
        try:
            if what < 0.25:
                one.put.broadcast()
            elif what < 0.35:
                self._trainers.share.broadcast()
            elif what < 0.45:
                one.note.broadcast()
            elif what < 0.48:
                one.take_back.broadcast(chance.random() < 0.5)
            elif what < 0.65:
                self._readers.serve.broadcast(chance.choice((f"own {trainer}", _TOGETHER)))
            else:
                key = chance.choice((f"own {trainer}", f"own {trainer}", _TOGETHER, f"small {trainer}"))
                # Without a journal the newest small values are posted in memory of the host, which is not simulated.
                waits = chance.random() < 0.3 or (key.startswith("small") and not self.has_journal)
                self._readers.get.broadcast(key, waits)
        except BackpressureError:
            pass

    def acting(self) -> tuple[SimulatedProcess, NotedController] | None:
        """The controller that is asked now, and its process."""
        if not self.controllers:
            return None
        succession = self.controllers[0][1]._succession
        if succession is None:
            return self.controllers[0]
        now = succession._now
        return next((each for each in self.controllers if now and identity_of(each[0]) == now.process), None)

    def spares(self, process: SimulatedProcess) -> bool:
        """Whether nothing may befall a process by chance."""
        return self.is_spared and (process in self._parts() or process.name.startswith(("trainer", "reader")))

    def victim(self, part: Part) -> SimulatedProcess | None:
        """The process that dies next, if one of that part may."""
        if part is Part.CLIENT:
            clients = self._clients()
            return self.chance.choice(clients) if clients else None
        if self.is_spared and (part is Part.VOLUME or not self.has_journal):
            return None
        found = self.acting() if part is Part.CONTROLLER or not self.volumes else self.chance.choice(self.volumes)
        return None if found is None else found[0]

    def recorded(self, controller: SimulatedProcess) -> None:
        """A controller has done a request; some die before they have answered it."""
        if self._crashes and self._is_replaced(controller) and self.chance.random() < _CRASHES:
            self._crashes -= 1
            world = self.ledger.world
            world.at(world.now_s + _ANSWER_S * self.chance.random(), None, controller.die)

    def teardown(self) -> Future[None]:
        """Shut the store down; in the script."""
        return self.entrance.teardown.call_one()

    # What clients do

    @contextmanager
    def operation(self, what: str, key: str, *, waits: bool = False) -> Iterator[Operation]:
        """Something that a client does: it ends, in an error only if that is in order."""
        operation = Operation(ledgers.here(), what, key, waits)
        self._open[operation] = None
        try:
            yield operation
        except Exception as error:  # noqa: BLE001  (each is judged)
            self._failed(operation, error)
        finally:
            del self._open[operation]
        self.ledger.answers += 1

    def _failed(self, operation: Operation, error: Exception) -> None:
        self.ledger.errors += 1
        if isinstance(error, KeyNotFoundError) and not (operation.known and self._is_settled(operation)):
            return
        if isinstance(error, StoreTimeoutError) and operation.waits:
            return
        is_known = isinstance(error, StoreError | ControlError)
        if not is_known or not self._may_fail(operation.client, operation):
            self._wrong(operation, f"ended in {type(error).__name__}: {error}")
        self.failed.add(operation.client)

    def look(self, operation: Operation) -> None:
        """Note what a read has to find at least."""
        operation.known, operation.changes = self.steps.get(operation.key, 0), self._changes[operation.key]

    @contextmanager
    def changed(self, key: str) -> Iterator[None]:
        """Versions of a key are taken back: meanwhile a read may find them or not."""
        self._changes[key] += 1
        yield
        self._changes[key] += 1

    def _is_settled(self, operation: Operation) -> bool:
        """Whether nothing was taken back while the key was read."""
        return operation.what == "take_back" or (
            operation.changes == self._changes[operation.key] and operation.changes % 2 == 0
        )

    def begun(self, key: str, step: int) -> None:
        """A step is being put."""
        self._begun[key] = max(step, self._begun.get(key, 0))

    def acknowledged(self, key: str, version: int, step: int) -> None:
        """A step was put."""
        self.steps[key] = max(step, self.steps.get(key, 0))
        if self._changes[key]:
            return  # the numbers of its versions are not those of its steps
        if self._versions.setdefault((key, version), step) != step:
            self.ledger.world.violation(f"version {version} of {key} is step {step}, and another one")
        if version != step and not any(self._may_fail(process) for process in (ledgers.here(), *self._writers(key))):
            self.ledger.world.violation(f"step {step} of {key} is version {version}: put twice, or not at all")

    def was_read(self, operation: Operation, version: int, found: set[int]) -> None:
        """A version was read."""
        if len(found) > 1:
            self._wrong(operation, f"steps {sorted(found)} in version {version}")
            return
        (step,) = found
        if not 0 < step <= self._begun.get(operation.key, 0):
            self._wrong(operation, f"step {step} in version {version}, which nobody has put")
        if self._versions.get((operation.key, version), step) != step and not self._changes[operation.key]:
            self._wrong(operation, f"step {step} in version {version}, which is another one")
        if step < operation.known and self._is_settled(operation) and not self._may_fail(operation.client, operation):
            self._wrong(operation, f"step {step} in version {version}, after {operation.known} was acknowledged")

    def _wrong(self, operation: Operation, what: str) -> None:
        self.ledger.world.violation(f"{operation.client}: {operation.what} of {operation.key}: {what}")

    # What may have gone wrong

    def _may_fail(self, client: SimulatedProcess, operation: Operation | None = None) -> bool:
        """Whether something is lost that the store needs, or an operation, to the client or to each other."""
        cluster, parts = self.ledger.cluster, self._parts()
        if any(member.id not in cluster.by_id for mesh in self.procs for member in mesh.root_members):
            return True
        if operation is not None and operation.what == "share":
            parts += self._writers(operation.key)
        if operation is not None and operation.key in self.direct_keys:
            # Its trainer waits for readers; one that is cut off from the store cannot give its lease back.
            parts += [*self._writers(operation.key), *(each for each in self._clients() if not each.is_dead)]
        ends = {*parts, client, cluster.script}
        ends |= {above for above in map(self.ledger.above, ends) if above is not None}
        if any(pair <= {end.id for end in ends} for pair in self.ledger.hurt):
            return True
        needed = [part for part in parts if not (part.is_dead and self._is_replaced(part))]
        return any(
            self.ledger.is_lost(one, other.id) for one in {*needed, client} for other in needed if one is not other
        )

    def _writers(self, key: str) -> list[SimulatedProcess]:
        """The trainers that put a key."""
        by_id = self.ledger.cluster.by_id
        trainers = [by_id[member.id] for member in self._trainers.root_members if member.id in by_id]
        return trainers if key == _TOGETHER else trainers[int(key.split()[-1]) :][:1]

    def _is_replaced(self, process: SimulatedProcess) -> bool:
        """Whether it was a controller after which another one comes, or a volume without which enough are left."""
        if any(process is each for each, _ in self.controllers[1:]):
            return self.has_journal
        volumes = [each for each, _ in self.volumes]
        alive = sum(not each.is_dead for each in volumes)
        return process in volumes and self.copies > max(len(volumes) - alive, 1) and alive >= self.copies

    def _parts(self) -> list[SimulatedProcess]:
        """Controllers and volumes."""
        found = [process for process, _ in self.controllers]
        for process in self.ledger.cluster.processes:
            is_of_store = bool(found) and process.parent is found[0]
            if process not in found and (is_of_store or process.name.startswith(("store", "volume"))):
                found.append(process)
        return found

    def _clients(self) -> list[SimulatedProcess]:
        members = (*self._trainers.root_members, *self._readers.root_members)
        by_id = self.ledger.cluster.by_id
        return [by_id[member.id] for member in members if member.id in by_id]

    # In the end

    def missing(self) -> Iterator[str]:
        """What has not come about and has to, or is held that nobody uses."""
        for operation in self._open:
            if not operation.client.is_dead:
                yield f"{operation.client}: {operation.what} of {operation.key} has not ended"
        clients = [each for each in (*self._clients(), self.ledger.cluster.script) if not each.is_dead]
        if not self._is_ready or any(self._may_fail(each) for each in clients):
            return
        acting = self.acting()
        if acting is None or acting[0].is_dead:
            yield "the store has no controller"
            return
        state = acting[1]._recorder.state
        for process, (leases, batches) in state.leases().items():
            if leases or batches:
                holder = self.ledger.memories.process_of(process.pid)
                yield f"{holder} still holds {sorted(leases)} {sorted(batches)}"
        yield from self._lost(state)
        yield from self._unused(state)

    def _lost(self, state: StoreState) -> Iterator[str]:
        for key, step in self.steps.items():
            if (
                not step
                or self._changes[key] % 2
                or (key in self.direct_keys and any(writer.is_dead for writer in self._writers(key)))
            ):
                continue
            history = state.index.get(key)
            version = history.newest if history is not None else None
            if version is None or version.lost is not None:
                yield f"{key} has lost step {step}"
                continue
            for contribution in version.contributions.values():
                for found in [[int(contribution.inline)]] if contribution.inline else map(_ends, contribution.holders):
                    if len(set(found)) > 1 or found[0] < step:
                        yield f"version {version.number} of {key} holds {found} behind step {step}"

    def _unused(self, state: StoreState) -> Iterator[str]:
        """Arenas that are in no version and belong to no living trainer."""
        used = {binding.id for each in state.index.histories() for v in each._all() for _, binding in v.bindings()}
        used |= set(state._ledger._idle)  # which are freed when memory is needed
        used |= {arena for process, pool in self.pools if not process.is_dead for arena in pool._all}
        for process, volume in self.volumes:
            for arena in volume._arenas if not process.is_dead else ():
                if arena not in used:
                    yield f"{process} keeps the arena {arena}, and nobody uses it"


async def _publish(publisher: Publisher, write: Callable[[Cost], Awaitable[Publication]]) -> Published:
    """Write a step, and tell the controller; again if the key was deleted meanwhile."""
    cost = Cost("put", time.perf_counter())

    async def publications() -> list[Publication]:
        return [await write(cost)]

    _, (published,) = await publisher._publish(publications, cost, _TIMEOUT_S)
    return published


async def _copy(publisher: Publisher, key: str, name: str, step: int, cost: Cost, turn: Turn = ALONE) -> Publication:
    """Copy a step into volumes."""
    packed = _packed(name, {"step": step})
    written = await publisher.snapshots.copy(key, packed, _current().copies, cost, _TIMEOUT_S)
    return replace(written, turn=turn)


def _packed(name: str, tensors: Any, storages: Any = ()) -> Packed:
    item = TensorItem("torch.uint8", (16,), (Piece(Box((0,), (16,)), (0,)),), 0, 0, (1,), 1)
    manifest = Manifest.of("state_dict", WHOLE, {name: item}, (), {name: (name,)})
    return Packed((), manifest, tensors, 0 if storages else VirtualMemory.nbytes, storages)


def _holders(share: Share) -> tuple[Binding, ...]:
    assert isinstance(share.binding, Binding)
    return (share.binding, *(copy for copy in share.copies if isinstance(copy, Binding)))


def _ends(binding: Binding) -> list[int]:
    memory: VirtualMemory = binding.buffers[0].memory  # type: ignore[attr-defined]
    return memory.ends


def install() -> None:
    """Have the schedule know the controllers and volumes of stores."""
    controller_actor.StoreController = NotedController  # type: ignore[misc]
    controller_volumes.StorageVolume = NotedVolume  # type: ignore[misc]


def forget() -> None:
    """Forget the event loops of a job that is over."""
    deadlines._clocks.clear()


def _current() -> Stored:
    stored = ledgers.current().stored
    assert stored is not None
    return stored
