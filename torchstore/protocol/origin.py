"""Who publishes: one of the ranks that put a version together, and the group that they are.

The group is what the caller says; else the process group of ``torch.distributed``, all of it; else the ranks of
`initialize_spmd`; else the process alone. Coordinates of a mesh never say who belongs together: ranks that have equal
ones in two meshes may be at different steps.
"""

from __future__ import annotations

import sys
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from threading import Lock
from typing import Any

from skipper.control.model.bounds import MAX_PROCESSES
from skipper.torchstore.errors import RendezvousError
from skipper.torchstore.support.compact import compact

_IDENTITY = "torchstore/origin"


@compact
@dataclass(frozen=True, slots=True)
class Origin:
    """One publisher of a group, as it can be given to `put_state_dict` (``publisher=``).

    Attributes:
        group: The group's name. All of its members say the same, and one that is made anew says another, so that the
            steps of the two are never taken for each other.
        rank: Of this publisher in the group.
        size: How many publishers the group has.

    Raises:
        ValueError: Rank and size do not fit together, or the name is no string.
    """

    group: str
    rank: int
    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.group, str):
            raise ValueError(f"the name of a group of publishers is a string, not {self.group!r:.80}")
        match (self.rank, self.size):
            case (int(rank), int(size)) if 0 <= rank < size <= MAX_PROCESSES:
                return
        said = f"{(self.rank, self.size)!r:.80}"
        raise ValueError(f"publisher is (index, count) with 0 <= index < count <= {MAX_PROCESSES}, not {said}")


SOLE = Origin("", 0, 1)
"""A process that publishes alone: each of its puts is a version."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Which put of which publisher a share comes from.

    Attributes:
        origin: The publisher.
        session: Unlike that of every other process that ever spoke for this rank; "" for one that publishes alone.
        number: The how-manieth put of the key by this rank it is, from 1: the step that it belongs to.
        alone: The share holds all of the value by itself; the other ranks have at most replicas of it. None: there is
            nothing in it.
        refused: How many puts before, which count as well, were refused before anything was sent; None: the caller says
            which version this one is, so that it does not matter.
    """

    origin: Origin = SOLE
    session: str = ""
    number: int = 0
    alone: bool | None = False
    refused: int | None = 0

    def __reduce__(self) -> str | tuple[type[Turn], tuple[Any, ...]]:
        """By name where it says nothing, as in most messages; pickling the fields of it costs more than the rest."""
        if self is ALONE:
            return "ALONE"
        return Turn, (self.origin, self.session, self.number, self.alone, self.refused)


ALONE = Turn()
"""Of whatever a process publishes alone."""


@dataclass(frozen=True, slots=True)
class Membership:
    """What a process is part of.

    Attributes:
        origin: Its group, and its place there.
        entered: Differs from one process group to the next, even where their members call them alike.
    """

    origin: Origin
    entered: int = 0


NOWHERE = Membership(SOLE)
"""A process that is part of nothing."""

_entries = count(1)
_lock = Lock()
_roster = NOWHERE
_last: tuple[Callable[[], object | None], Membership] | None = None


def enrol(group: str, rank: int, size: int) -> None:
    """The ranks of `initialize_spmd` are a group wherever there is no process group."""
    global _roster
    _roster = Membership(Origin(group, rank, size), next(_entries)) if size > 1 else NOWHERE


def dismiss() -> None:
    """There are no such ranks any more."""
    global _roster
    _roster = NOWHERE


def read_publisher(publisher: object) -> Origin | None:
    """What a caller says of itself.

    Args:
        publisher: None, an `Origin`, or (index, count).

    Raises:
        ValueError: It is something else, or the numbers do not fit together.
    """
    match publisher:
        case None:
            return None
        case Origin():
            return publisher
        case (int(index), int(number)):
            return _one_of(index, number)
    raise ValueError(
        f"publisher is (index, count) with 0 <= index < count <= {MAX_PROCESSES}, or an Origin, not {publisher!r:.80}"
    )


@lru_cache(maxsize=16)
def _one_of(index: int, number: int) -> Origin:
    return Origin("", index, number)


def known_membership() -> Membership | None:
    """What this process is part of; None where `membership` has to ask for that."""
    group = _process_group()
    if group is None:
        return _roster
    last = _last
    return last[1] if last is not None and last[0]() is group else None


def membership() -> Membership:
    """What this process is part of. Asks the process group's own store, once for each group; may block.

    Raises:
        RendezvousError: That store does not answer.
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
    distributed: Any = sys.modules.get("torch.distributed")  # where nobody has imported it, there is no group
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.group.WORLD  # type: ignore[no-any-return]


def _identity(distributed: Any, size: int) -> str:
    """A name that all members of the process group agree on: the first one that asks has made it up.

    Raises:
        RendezvousError: The group's store does not answer: the rank that hosts it is gone.
    """
    try:
        store = distributed.distributed_c10d._get_default_store()
        return str(store.compare_set(_IDENTITY, "", uuid.uuid4().hex).decode())
    except distributed.DistError as error:
        raise RendezvousError(f"the store of the process group does not answer: {error}") from error
    except (RuntimeError, NotImplementedError):  # a store that compares nothing: torch's fake one, say
        return f"process group of {size}"
