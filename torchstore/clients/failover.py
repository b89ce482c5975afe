"""Reading what lies in several volumes: when one of them is gone, the reader goes on with another's copy."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from typing import TypeVar

from skipper.dataplane.errors import TransferError
from skipper.torchstore.algebra.copies import choose
from skipper.torchstore.clients.catalog import Choose
from skipper.torchstore.clients.remote import RemoteStore
from skipper.torchstore.errors import StoreTimeoutError, VolumeLostError
from skipper.torchstore.support.process import this_process

T = TypeVar("T")

_PATIENCE = 0.5  # of the time that is left: so long the copies at hand are read before others are tried
_ANSWER_S = 5.0  # a volume that answers nothing for so long is taken for gone, by this read


class Failover:
    """Picks copies for the readers of one process.

    Args:
        remote: The store.
    """

    def __init__(self, remote: RemoteStore) -> None:
        self._remote = remote
        self._near = {name for name, process in remote.info.processes.items() if process.is_local}

    def choose(self, lost: Collection[str] = ()) -> Choose:
        """Picks a copy that is near and not known to be lost."""
        gone = {*self._remote.lost, *lost}
        return partial(choose, near=self._near, lost=gone, reader=this_process().pid)

    async def read(
        self, parts: Iterable[Collection[str]], end: float, read: Callable[[Choose, float], Awaitable[T]]
    ) -> T:
        """Read from one copy of each part; again, from others, where a volume turns out to be gone.

        Args:
            parts: For each part, the volumes that hold a copy of it.
            end: Until when, by `time.perf_counter`.
            read: Reads from the copies that it is told to choose, until the time that it is told.

        Raises:
            VolumeLostError: No copy is left of some part.
            StoreTimeoutError: It took too long.
        """
        held, lost = [set(volumes) for volumes in parts], set[str]()
        all_answer = False
        while True:
            left = [volumes - self._remote.lost - lost for volumes in held]
            has_spare = not all_answer and any(len(volumes) > 1 for volumes in left)
            now = time.perf_counter()
            try:
                return await read(self.choose(lost), now + (end - now) * _PATIENCE if has_spare else end)
            except (VolumeLostError, StoreTimeoutError, TransferError) as error:
                if not has_spare:
                    raise
                asked = set[str]().union(*left)
                patience = min(_ANSWER_S, max(end - time.perf_counter(), 0.0) * _PATIENCE)
                silent = await self._remote.find_silent(asked, patience)
                if not silent and not isinstance(error, StoreTimeoutError):
                    raise
                all_answer = not silent  # then it only takes long: in the time that is left
                lost |= silent
