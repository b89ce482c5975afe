"""Memory of simulated processes that others read and write one-sidedly, and the identities of these processes.

A `VirtualMemory` stands for a registered tensor. It has two ends, and a transfer touches one after the other, so a read
notices a write that happens at the same time. `install` replaces the data plane below the store by it. It also replaces
what the store uses of the operating system: process ids, pidfds, the files of journals, threads and conditions.
"""

from __future__ import annotations

import asyncio
import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from skipper.control.model.future import Gate
from skipper.dataplane.errors import BufferDroppedError, OwnerDiedError
from skipper.torchstore.clients import arenas, controller_link, direct_put, membership
from skipper.torchstore.controller import journal
from skipper.torchstore.peers import volume
from skipper.torchstore.support import process as identities
from skipper.torchstore.support.process import ProcessId
from tests.simulation import ledger as ledgers
from tests.simulation import world as worlds

if TYPE_CHECKING:
    from tests.simulation.processes import Cluster, SimulatedProcess
    from tests.simulation.world import World

_TRANSFER_S = 0.02
_LONG_TRANSFER_S = 1.0
"""Within these times a transfer has come from one end to the other."""
_CHECKPOINT_NBYTES = 8 << 10
_FIRST_PID = 1 << 24
"""Above every process of the operating system."""


class VirtualMemory:
    """Registered memory of one process.

    Attributes:
        name: unique in its job.
        owner: the process whose memory it is.
        ends: what is at its two ends.
        is_dropped: whether its owner has let go of it.
    """

    nbytes = 16

    def __init__(self) -> None:
        memories = _current()
        self.name = f"memory{len(memories.all)}"
        self.owner = ledgers.here()
        self.ends = [0, 0]
        self.is_dropped = False
        memories.all[self.name] = self

    def fill_(self, value: int) -> None:
        """Fill it at once, in the process that owns it."""
        self.ends = [value, value]

    def check(self) -> None:
        """See whether it can be reached.

        Raises:
            OwnerDiedError: its process is gone.
            BufferDroppedError: it was dropped.
        """
        if self.owner.is_dead:
            raise OwnerDiedError(f"{self.owner} is dead")
        if self.is_dropped:
            raise BufferDroppedError(f"{self.owner} has dropped {self.name}")

    async def read(self) -> tuple[int, int]:
        """What is at its two ends, one after the other."""
        self.check()
        first = self.ends[0]
        await _some_time()
        self.check()
        return first, self.ends[1]

    async def write(self, value: int) -> None:
        """Fill it, one end after the other."""
        self.check()
        self.ends[0] = value
        await _some_time()
        self.check()
        self.ends[1] = value


class VirtualBuffer:
    """A handle of memory: an `RDMABuffer`, as far as the store uses it."""

    def __init__(self, memory: VirtualMemory, writable: bool = True) -> None:
        self.memory = memory

    def drop(self) -> None:
        """See `RDMABuffer.drop`."""
        self.memory.is_dropped = True

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.memory.name,)


def _arrived(name: str) -> VirtualBuffer:
    return VirtualBuffer(_current().all[name])


class VirtualWrite:
    """A transfer into memory: an `RDMAAction` of the store."""

    segments = 1

    def __init__(self, buffer: VirtualBuffer, value: int) -> None:
        self._memory = buffer.memory
        self._value = value

    async def run(self) -> None:
        """Write."""
        await self._memory.write(self._value)


async def _execute(write: VirtualWrite, nbytes: int, timeout: float, **_: object) -> None:
    await write.run()


async def _some_time() -> None:
    chance = worlds.current().chance
    await asyncio.sleep((_LONG_TRANSFER_S if chance.random() < 0.1 else _TRANSFER_S) * chance.random())


class Memories:
    """The memory of one job, and what its processes have open.

    Attributes:
        all: by name.
    """

    def __init__(self, world: World, cluster: Cluster) -> None:
        self.all: dict[str, VirtualMemory] = {}
        self.held: dict[str, dict[str, tuple[int, controller_link.HeldLeases]]] = {}
        self._world = world
        self._cluster = cluster
        self._files: dict[int, SimulatedProcess] = {}
        self._pidfds = 0

    def process_of(self, pid: int) -> SimulatedProcess:
        """The process with this id."""
        return self._cluster.processes[pid - _FIRST_PID]

    def pidfd(self, pid: int) -> int:
        """What becomes readable, on the event loop that runs, when a process ends."""
        process, loop = self.process_of(pid), asyncio.get_running_loop()
        if process.is_dead:
            raise ProcessLookupError
        self._pidfds += 1
        number = self._pidfds
        process.when_dead.append(lambda: loop.call_soon(loop.readable, number))  # type: ignore[attr-defined]
        return number

    def opened(self, descriptor: int) -> int:
        """A file that is closed when the process ends that runs."""
        owner = ledgers.here()
        self._files[descriptor] = owner
        owner.when_dead.append(lambda: self.close(descriptor) if self._files.get(descriptor) is owner else None)
        return descriptor

    def close(self, descriptor: int) -> None:
        """Close a file."""
        if self._files.pop(descriptor, None) is not None:
            os.close(descriptor)

    def close_all(self) -> None:
        """Close what the processes have left open."""
        for descriptor in list(self._files):
            self.close(descriptor)


class _Condition:
    """A `threading.Condition` on the virtual clock."""

    def __init__(self) -> None:
        self._waiting: list[Gate] = []

    def __enter__(self) -> None:
        """Nobody else runs meanwhile."""

    def __exit__(self, *exception: object) -> None:
        """Nobody else has run."""

    def wait(self, timeout: float) -> bool:
        """Let other things happen until somebody notifies."""
        gate = Gate()
        self._waiting.append(gate)
        worlds.current().wait(gate, timeout, takes_all=False)
        return gate.is_open

    def notify_all(self) -> None:
        """Wake whoever waits."""
        waiting, self._waiting = self._waiting, []
        for gate in waiting:
            gate.open()


def identity_of(process: SimulatedProcess) -> ProcessId:
    """As the store knows it."""
    return ProcessId(process.ip, _FIRST_PID + process.number, process.number)


def _held_of(store_name: str, client: int) -> controller_link.HeldLeases:
    of_process = _current().held.setdefault(ledgers.here().id, {})
    store = client >> controller_link.CLIENTS_BITS
    found = of_process.get(store_name)
    if found is None or found[0] != store:
        found = of_process[store_name] = store, controller_link.HeldLeases()
    return found[1]


def _start_time(pid: int) -> int | None:
    process = _current().process_of(pid)
    return None if process.is_dead else process.number


def _open_journal(owner: ProcessId, number: int) -> int:
    if not owner.is_alive():
        raise journal.JournalError(f"{owner} has closed the journal")
    return _current().opened(os.open(f"/proc/self/fd/{number}", os.O_RDWR | os.O_CLOEXEC))


def _sleep(seconds: float) -> None:
    worlds.current().wait(Gate(), seconds, takes_all=False)


def install() -> None:
    """Have the store use simulated memory, processes, files and threads."""
    uuid = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=worlds.current().chance.randbytes(8).hex()))
    dataplane = SimpleNamespace(empty=lambda shape, dtype: VirtualMemory())
    for module in (volume, direct_put):
        _replace(module, dataplane=dataplane, RDMABuffer=VirtualBuffer, uuid=uuid)
    _replace(membership, uuid=uuid)
    _replace(arenas, execute=_execute)
    _replace(
        identities,
        _identify=lambda _: identity_of(ledgers.here()),
        _host=lambda: ledgers.here().ip,
        _start_time=_start_time,
        os=SimpleNamespace(
            getpid=os.getpid, pidfd_open=lambda pid: _current().pidfd(pid), close=lambda descriptor: None
        ),
    )
    _replace(controller_link, Condition=_Condition, Thread=worlds.Thread, held_of=_held_of)
    _replace(
        journal,
        _open=_open_journal,
        _LEAST_CHANGES=_CHECKPOINT_NBYTES,
        _AHEAD=_CHECKPOINT_NBYTES,
        time=SimpleNamespace(monotonic=time.monotonic, sleep=_sleep),
        os=_JournalFiles,
    )


class _JournalFiles:
    """The functions of `os` that a journal uses, with files that end with simulated processes."""

    MFD_CLOEXEC = os.MFD_CLOEXEC
    fchmod, pread, pwrite, fstat, ftruncate = os.fchmod, os.pread, os.pwrite, os.fstat, os.ftruncate
    posix_fallocate, urandom = os.posix_fallocate, os.urandom

    @staticmethod
    def memfd_create(name: str, flags: int) -> int:
        """A file of the process that runs."""
        return _current().opened(os.memfd_create(name, flags))

    @staticmethod
    def close(descriptor: int) -> None:
        """Close it, unless the process has ended meanwhile."""
        _current().close(descriptor)


def _replace(module: Any, **names: Any) -> None:
    for name, value in names.items():
        setattr(module, name, value)


def _current() -> Memories:
    return ledgers.current().memories
