"""A storage volume: an actor that owns memory into which publishers write one-sidedly.

It gets two requests during the life of an arena, to allocate and to free it; writes and reads do not involve it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from skipper import dataplane
from skipper.control import Actor, endpoint
from skipper.dataplane import RDMABuffer
from skipper.torchstore.algebra.manifest import Binding
from skipper.torchstore.algebra.sections import open_section_id
from skipper.torchstore.errors import StoreError, VolumeFullError
from skipper.torchstore.support.lru_cache import LRUCache
from skipper.torchstore.support.process import ProcessId, this_process

_DEAD = 256


class DeadWriterError(StoreError):
    """The store has taken the process for dead since it gave a number to this client of it."""


@dataclass(slots=True)
class _Arena:
    writer: ProcessId
    memory: torch.Tensor
    buffer: RDMABuffer
    cut: dict[str, int] = field(default_factory=dict)  # bytes that were given back to the system, by range

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes - sum(self.cut.values())


class StorageVolume(Actor):
    """Keeps arenas: pieces of shared, registered memory, each for one publisher.

    Args:
        id_func: Names this volume; called here, in the volume's process (`TorchStoreStrategy.get_volume_id`).
        limit: How many bytes all arenas together may have; None: as many as the system gives.
    """

    def __init__(self, id_func: Callable[[], str], limit: int | None) -> None:
        self._id = id_func()
        self._limit = limit
        self._arenas: dict[str, _Arena] = {}
        self._dead: LRUCache[ProcessId, int] = LRUCache(_DEAD)

    @endpoint
    def identify(self) -> tuple[str, ProcessId]:
        """The volume's id, and the process that owns its memory."""
        return self._id, this_process()

    @endpoint
    def allocate(self, writer: ProcessId, nbytes: int, client: int) -> Binding:
        """Make an arena of ``nbytes`` that ``writer`` may write to until it is freed.

        ``client`` is the number that the store has given to the writer's client.

        Returns:
            A binding whose only buffer is the arena; `free` takes its id.

        Raises:
            VolumeFullError: It would not fit next to the others.
            DeadWriterError: The store has taken the writer for dead since it gave out this number.
        """
        if client < (self._dead.get(writer) or 0):
            raise DeadWriterError(f"{writer} has died, or has left the job")
        if self._limit is not None and nbytes + self._nbytes() > self._limit:
            raise VolumeFullError(self._id, nbytes, self._limit)
        memory = dataplane.empty((nbytes,), torch.uint8)
        buffer = RDMABuffer(memory)
        binding = Binding(uuid.uuid4().hex, "snapshot", self._id, (buffer,))
        self._arenas[binding.id] = _Arena(writer, memory, buffer)
        return binding

    @endpoint
    def free(self, arenas: tuple[str, ...]) -> None:
        """Drop arenas. A handle that is still used raises an error. Unknown ids are ignored.

        Ranges (`sections.section_id`) of an arena give their pages back to the system: nobody reads them any more.
        """
        for name in arenas:
            whole, offset, nbytes = open_section_id(name)
            if nbytes and whole in self._arenas and name not in self._arenas[whole].cut:
                arena = self._arenas[whole]
                arena.cut[name] = dataplane.release_pages(arena.memory[offset : offset + nbytes])
            elif not nbytes and whole in self._arenas:
                self._arenas.pop(whole).buffer.drop()

    @endpoint
    def free_writer(self, writer: ProcessId, keep: tuple[str, ...], clients_below: int) -> None:
        """Drop the arenas of a dead publisher, except those with versions: they outlive it.

        The publisher's last requests may arrive later than this message. So `allocate` refuses those of its clients
        with numbers below ``clients_below``.
        """
        self._dead.put(writer, max(clients_below, self._dead.get(writer) or 0))
        self._drop(lambda name, arena: arena.writer == writer and name not in keep)

    @endpoint
    def reset(self) -> None:
        """Drop everything (the store is shut down)."""
        self._drop(lambda _name, _arena: True)

    @endpoint
    def usage(self) -> tuple[int, int]:
        """How many arenas there are, and their bytes."""
        return len(self._arenas), self._nbytes()

    def _nbytes(self) -> int:
        return sum(arena.nbytes for arena in self._arenas.values())

    def _drop(self, condition: Callable[[str, _Arena], bool]) -> None:
        for name in [name for name, arena in self._arenas.items() if condition(name, arena)]:
            self._arenas.pop(name).buffer.drop()
