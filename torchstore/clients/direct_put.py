"""Direct puts: a version is the tensors' own memory, under a seal that says whether it may be read."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import torch

from skipper import dataplane
from skipper.dataplane import RDMABuffer
from skipper.torchstore.algebra.manifest import Binding
from skipper.torchstore.clients.remote import RemoteStore
from skipper.torchstore.clients.requests import StateDictPut
from skipper.torchstore.protocol.messages import Publication
from skipper.torchstore.support.process import this_process
from skipper.torchstore.support.records import Cost
from skipper.torchstore.tensors.packing import Packed, take_sums


@dataclass(slots=True)
class _Registration:
    packed: Packed
    binding: Binding
    seal: torch.Tensor


class DirectMemory:
    """The registrations of one publisher, by key: made once per memory, not once per put.

    Along with the tensors there is a seal, one word. It holds the generation that is published, and 0 while this
    process may be writing. Readers read it one-sidedly before and after the data. If it is not the granted generation
    both times, the bytes are not those of one version.
    """

    def __init__(self) -> None:
        self._current: dict[str, _Registration] = {}
        self._generations: dict[str, int] = {}
        self._replaced: dict[str, _Registration] = {}  # there may still be readers of an older version

    def find(self, key: str, mark: tuple[object, ...]) -> Packed | None:
        """The registration under this key, if it is of the memory with this fingerprint."""
        current = self._current.get(key)
        return current.packed if current is not None and current.packed.mark == mark else None

    def publish(self, key: str, packed: Packed) -> tuple[Binding, int]:
        """Seal the memory as it is now, as the next generation.

        Returns:
            The binding, equal for as long as the memory is, and the generation.

        Raises:
            dataplane.errors.RegistrationError: Some memory cannot be registered.
        """
        current = self._current.get(key)
        if current is None or current.packed is not packed:
            if current is not None:
                current.seal.fill_(0)
                self._replaced[current.binding.id] = current
            current = self._current[key] = _register(packed)
        generation = self._generations[key] = self._generations.get(key, 0) + 1
        current.seal.fill_(generation)
        return current.binding, generation

    def withdraw(self, key: str) -> None:
        """Break the seal, so that a late reader detects it."""
        current = self._current.get(key)
        if current is not None:
            current.seal.fill_(0)

    def retire(self, binding: str) -> None:
        """No version uses this memory any more: release it. The key's next version registers its own."""
        replaced = self._replaced.pop(binding, None)
        if replaced is not None:
            _drop(replaced)
        for key, current in list(self._current.items()):
            if current.binding.id == binding:
                self.forget(key)

    def forget(self, key: str) -> None:
        """The key was deleted: readers get errors from now on, and only this process uses the tensors."""
        current = self._current.pop(key, None)
        if current is not None:
            _drop(current)

    def close(self) -> None:
        """Drop every registration."""
        for registration in [*self._current.values(), *self._replaced.values()]:
            _drop(registration)
        self._current.clear()
        self._replaced.clear()


def _register(packed: Packed) -> _Registration:
    seal = dataplane.empty((1,), torch.int64)
    seal.fill_(0)
    buffers = tuple(RDMABuffer(storage, writable=False) for storage in packed.storages)
    binding = Binding(uuid.uuid4().hex, "direct", "", buffers, RDMABuffer(seal, writable=False))
    return _Registration(packed, binding, seal)


def _drop(registration: _Registration) -> None:
    registration.seal.fill_(0)
    for buffer in registration.binding.buffers:
        buffer.drop()
    if registration.binding.seal is not None:
        registration.binding.seal.drop()


class DirectPuts(DirectMemory):
    """The state dicts of one process that readers read where they are. Has the interface `publish.StateDictPuts`."""

    def __init__(self, remote: RemoteStore) -> None:
        super().__init__()
        self._remote = remote

    async def free_staged(self, key: str, cost: Cost, timeout: float) -> None:
        """Wait until no process reads the converted copies of the last put: the next one overwrites them.

        Raises:
            StoreTimeoutError: A process is still reading.
        """
        if key in self._current:
            with cost.spent_on("control"):
                await self._remote.fence(key, close=True, timeout=timeout)
            self.withdraw(key)

    def remember(self, key: str, packed: Packed) -> None:
        """`write` registers what is published, and keeps it for the next put."""

    async def write(self, put: StateDictPut, packed: Packed, cost: Cost) -> Publication:
        """Seal the memory as it is now.

        Raises:
            dataplane.errors.RegistrationError: Some memory cannot be registered.
        """
        cost.mode = "direct"
        await take_sums(packed, cost)
        with cost.spent_on("compile"):
            binding, generation = self.publish(put.key, packed)
        return Publication(put.key, put.version, this_process(), packed.manifest, binding, generation)

    def published(self, put: StateDictPut, packed: Packed, publication: Publication) -> None:
        """No later put depends on this one."""
