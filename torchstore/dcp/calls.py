"""The store for code without an event loop: `torch.distributed.checkpoint` calls plain functions."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from skipper.control.model.bounds import check_seconds
from skipper.torchstore.clients.local_client import LocalClient
from skipper.torchstore.clients.pinning import PinnedVersion
from skipper.torchstore.clients.registry import run as run_on
from skipper.torchstore.clients.requests import VersionSelector
from skipper.torchstore.support.blocking import run as run_blocking
from skipper.torchstore.support.blocking import run_soon

T = TypeVar("T")


class BlockingStore:
    """Blocking calls of one store, from any thread.

    It runs in the context in which it was made: an actor may hand it to threads of its own, as
    `torch.distributed.checkpoint.async_save` does.
    """

    def __init__(self, store_name: str, timeout: float) -> None:
        self.timeout = check_seconds("timeout", timeout)
        self._store_name = store_name
        self._context = contextvars.copy_context()

    def run(self, operation: Callable[[LocalClient], Awaitable[T]]) -> T:
        """Run a coroutine function with this process' client of the store."""

        async def work() -> T:
            return await run_on(self._store_name, self.timeout, operation)

        return self._context.copy().run(run_blocking, work)

    def pin(self, key: str, version: VersionSelector, beside: int | None = None) -> PinnedVersion:
        """See `LocalClient.pin`."""
        return self.run(lambda own: own.pin(key, version=version, beside=beside, timeout=self.timeout))

    def reserve(self, key: str) -> int:
        """See `LocalClient.reserve`."""
        return self.run(lambda own: own.reserve(key, timeout=self.timeout))

    def release_soon(self, pinned: PinnedVersion) -> None:
        """Release a version later; for finalisers, which may run in any thread at any moment."""
        self._context.copy().run(run_soon, pinned.release)


class Keyed:
    """A checkpoint in the store, by its key: the common part of its reader and its writer.

    Attributes:
        key: The key in the store.

    Raises:
        TypeError: An argument has another type.
        ValueError: The key is empty, or the timeout is not a number.
    """

    def __init__(self, key: str | os.PathLike[str], store_name: str, timeout: float) -> None:
        self.key = key_of(key)
        self._store = BlockingStore(store_name, timeout)

    @property
    def checkpoint_id(self) -> str:
        """The key."""
        return self.key

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a valid key."""
        try:
            key_of(checkpoint_id)
        except (TypeError, ValueError):
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start again, with another key if one is given."""
        if checkpoint_id is not None:
            self.key = key_of(checkpoint_id)


def key_of(checkpoint_id: Any) -> str:
    """The key of a checkpoint.

    Raises:
        TypeError: Its id is neither a string nor a path.
        ValueError: It is empty.
    """
    if not isinstance(checkpoint_id, str | Path):
        raise TypeError(f"a checkpoint is stored under a key, which is a string, not {checkpoint_id!r}")
    if not str(checkpoint_id):
        raise ValueError("a checkpoint is stored under a key, which is not empty")
    return str(checkpoint_id)
