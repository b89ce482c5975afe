"""Direct puts: a version is the tensors' own memory, under a seal that says whether it may be read."""

from __future__ import annotations

from typing import Any

from skipper.torchstore.clients.direct_memory import DirectMemory
from skipper.torchstore.clients.remote import RemoteStore
from skipper.torchstore.clients.requests import StateDictPut
from skipper.torchstore.protocol.messages import Publication
from skipper.torchstore.support.process import this_process
from skipper.torchstore.support.records import Cost
from skipper.torchstore.tensors.packing import Packed, take_sums


class DirectPuts:
    """The state dicts of one process that readers read where they are. Has the interface `publish.StateDictPuts`.

    Args:
        remote: The store.
    """

    def __init__(self, remote: RemoteStore) -> None:
        self._remote = remote
        self._memory = DirectMemory()

    async def free_staged(self, key: str, cost: Cost, timeout: float) -> None:
        """Wait until nobody reads the converted copies of the last put: the next one writes over them.

        Raises:
            StoreTimeoutError: Somebody still reads.
        """
        if self._memory.holds(key):
            with cost.spent_on("control"):
                await self._remote.fence(key, close=True, timeout=timeout)
            self._memory.withdraw(key)

    def find(self, key: str, mark: tuple[Any, ...]) -> Packed | None:
        """What is registered under a key, if it is the memory with this fingerprint."""
        return self._memory.registered(key, mark)

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
            binding, generation = self._memory.publish(put.key, packed)
        return Publication(put.key, put.version, this_process(), packed.manifest, binding, generation)

    def published(self, put: StateDictPut, packed: Packed, publication: Publication) -> None:
        """No later put rests on this one."""

    def withdraw(self, key: str) -> None:
        """Break the seal of what is published under a key."""
        self._memory.withdraw(key)

    def retire(self, binding: str) -> None:
        """No version uses this memory any more."""
        self._memory.retire(binding)

    def forget(self, key: str) -> None:
        """The key was deleted: the tensors are the caller's alone again."""
        self._memory.forget(key)

    def close(self) -> None:
        """Drop every registration: what this process has published in direct mode ends here."""
        self._memory.close()
