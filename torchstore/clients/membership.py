"""The group of publishers that this process is part of, and how often it has put each key there.

The group is the one that the caller gives; else the whole process group of ``torch.distributed``; else the ranks of
`initialize_spmd`; else the process alone. Coordinates of a mesh never decide which processes belong together: ranks
with equal ones in two meshes may be at different steps.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Any

from skipper.torchstore.errors import (
    LateShareError,
    MismatchError,
    OutOfStepError,
    StoreRendezvousError,
    StoreTimeoutError,
    VersionExistsError,
)
from skipper.torchstore.protocol.messages import Published
from skipper.torchstore.protocol.origin import ALONE, SOLE, Origin, Turn
from skipper.torchstore.support.deadlines import within
from skipper.torchstore.support.lru_cache import LRUCache
from skipper.torchstore.tensors.local_tensors import dtensor_type

_IDENTITY = "torchstore/origin"


@dataclass(frozen=True, slots=True)
class Membership:
    """The group that a process is part of.

    Attributes:
        origin: Its group, and its rank there.
        entered: Differs from one process group to the next, even if their members give them the same name.
    """

    origin: Origin
    entered: int = 0


NOWHERE = Membership(SOLE)
"""A process that is part of no group."""

_entries = count(1)
_lock = Lock()
_roster = NOWHERE
_last: tuple[Callable[[], object | None], Membership] | None = None


def enrol(group: str, rank: int, size: int) -> None:
    """The ranks of `initialize_spmd` are a group if there is no process group."""
    global _roster
    _roster = Membership(Origin(group, rank, size), next(_entries)) if size > 1 else NOWHERE


def dismiss() -> None:
    """These ranks no longer exist."""
    global _roster
    _roster = NOWHERE


def known_membership() -> Membership | None:
    """The group that this process is part of; None if `membership` has to ask for it."""
    group = _process_group()
    if group is None:
        return _roster
    last = _last
    return last[1] if last is not None and last[0]() is group else None


def membership() -> Membership:
    """The group that this process is part of. Asks the process group's own store, once for each group; may block.

    Raises:
        StoreRendezvousError: That store does not answer.
    """
    global _last
    group = _process_group()
    if group is None:
        return _roster
    distributed: Any = sys.modules["torch.distributed"]
    with _lock:
        if _last is None or _last[0]() is not group:
            rank, size = distributed.get_rank(), distributed.get_world_size()
            origin = Origin(_identity(distributed, size), rank, size) if size > 1 else SOLE
            _last = weakref.ref(group), Membership(origin, next(_entries))
        return _last[1]


def _process_group() -> object | None:
    distributed: Any = sys.modules.get("torch.distributed")  # if it was not imported, there is no group
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.group.WORLD  # type: ignore[no-any-return]


def _identity(distributed: Any, size: int) -> str:
    """A name that all members of the process group agree on: the first one that asks creates it.

    Raises:
        StoreRendezvousError: The group's store does not answer: the rank that hosts it is gone.
    """
    try:
        store = distributed.distributed_c10d._get_default_store()
        return str(store.compare_set(_IDENTITY, "", uuid.uuid4().hex).decode())
    except distributed.DistError as error:
        raise StoreRendezvousError(f"the store of the process group does not answer: {error}") from error
    except (RuntimeError, NotImplementedError):  # a store that compares nothing, such as torch's fake one
        return f"process group of {size}"


_REMEMBERED = 65_536


@dataclass(slots=True)
class _Count:
    """The puts of one key in one group.

    Attributes:
        session: Differs from every other session of this rank. A count that was forgotten starts as a new session.
        failed: The put since which it is not known which step comes next; 0 while it is known.
        refused: How many were refused here. If all ranks were refused equally they are still in step, and the
            controller checks that they are.
    """

    session: str
    number: int = 0
    failed: int = 0
    refused: int = 0


class PutCounts:
    """Counts the puts of one client."""

    def __init__(self) -> None:
        self._counts: LRUCache[tuple[str, Origin, int], _Count] = LRUCache(_REMEMBERED)

    async def member(self, publisher: Origin | None, timeout: float) -> Membership:
        """The group that this process is part of.

        Raises:
            StoreTimeoutError: The store of the process group does not answer.
            RendezvousError: The store of the process group is gone.
        """
        if publisher is not None:
            return Membership(publisher)
        known = known_membership()
        if known is not None:
            return known
        try:
            return await within(timeout, asyncio.to_thread(membership))
        except TimeoutError as error:
            raise StoreTimeoutError(f"the store of the process group did not answer within {timeout:g} s") from error

    def next(self, key: str, member: Membership, version: int | None, *, alone: bool | None) -> Turn:
        """The next put of a key.

        Raises:
            OutOfStepError: The put before has failed, and no version says which step this one is.
        """
        if member.origin.size == 1:
            return ALONE
        at = (key, member.origin, member.entered)
        count = self._counts.get(at) or self._counts.put(at, _Count(uuid.uuid4().hex))
        count.number += 1
        if count.failed and version is None:
            raise OutOfStepError(
                key,
                f"put {count.failed} of rank {member.origin.rank} of {member.origin.size} failed, so it is unknown "
                "whether this put repeats that step or is the next one: say which version it is (version=...), or let "
                "all ranks publish as another group (publisher=Origin(...))",
            )
        return Turn(member.origin, count.session, count.number, alone, count.refused if version is None else None)

    @contextmanager
    def counted(self, member: Membership, turns: Mapping[str, Turn]) -> Iterator[None]:
        """Puts of these turns, by key; if they fail, this decides about the next ones. Turns may be added inside."""
        try:
            yield
        except BaseException as error:
            for key, turn in turns.items():
                self.failed(key, member, turn, error)
            raise

    def failed(self, key: str, member: Membership, turn: Turn, error: BaseException) -> None:
        """A put has failed: unless it was refused, here or by the controller, it is not known whether it counts."""
        count = self._counts.get((key, member.origin, member.entered))
        if count is None or count.failed:
            return
        # A rank that was refused may put the same again, or go on. Ranks that were refused equally are still in step.
        is_refused = isinstance(error, LateShareError | MismatchError | TypeError | ValueError)
        if is_refused and not isinstance(error, VersionExistsError | OutOfStepError):
            count.refused += 1
        else:
            count.failed = turn.number

    def settled(self, key: str, member: Membership, published: Published) -> None:
        """A put was of a version that the caller has named: the next one belongs to the step after it."""
        count = self._counts.get((key, member.origin, member.entered))
        if count is not None:
            count.number, count.failed, count.refused = published.step, 0, 0


def holds_all(leaves: Mapping[str, Any]) -> bool | None:
    """Whether a state dict seems to be the whole value: it has no DTensor.

    Returns:
        None: there is nothing in it.
    """
    if not leaves:
        return None
    distributed = dtensor_type()
    return not (distributed and any(isinstance(leaf, distributed) for leaf in leaves.values()))
