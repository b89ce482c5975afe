"""The store for code that has no event loop: what `torch.distributed.checkpoint` calls are plain functions."""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from control.bounds import check_seconds
from torchstore.adapters.blocking import run as run_blocking
from torchstore.client import LocalClient
from torchstore.clients import run as run_on

T = TypeVar("T")


class BlockingStore:
    """One store, whose operations are run to their end in whatever thread asks.

    It belongs to whoever made it: an actor's code that makes one may hand it to threads of its own, as
    `torch.distributed.checkpoint.async_save` does.

    Args:
        store_name: Which store.
        timeout: Of each operation, in seconds.
    """

    def __init__(self, store_name: str, timeout: float) -> None:
        self.timeout = check_seconds("timeout", timeout)
        self._store_name = store_name
        self._context = contextvars.copy_context()

    def run(self, operation: Callable[[LocalClient], Awaitable[T]]) -> T:
        """Do something with this process' client of the store."""

        async def work() -> T:
            return await run_on(self._store_name, self.timeout, operation)

        return self._context.copy().run(run_blocking, work())


def is_key(checkpoint_id: object) -> bool:
    """Whether the id of a checkpoint can be a key of the store."""
    return isinstance(checkpoint_id, str | Path) and bool(str(checkpoint_id))


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
