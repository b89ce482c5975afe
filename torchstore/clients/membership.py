"""The group of publishers that this process is part of.

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
from itertools import count
from threading import Lock
from typing import Any

from skipper.torchstore.errors import StoreRendezvousError
from skipper.torchstore.protocol.origin import SOLE, Origin

_IDENTITY = "torchstore/origin"


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
    distributed: Any = sys.modules.get("torch.distributed")  # where nobody has imported it, there is no group
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.group.WORLD  # type: ignore[no-any-return]


def _identity(distributed: Any, size: int) -> str:
    """A name that all members of the process group agree on: the first one that asks has made it up.

    Raises:
        StoreRendezvousError: The group's store does not answer: the rank that hosts it is gone.
    """
    try:
        store = distributed.distributed_c10d._get_default_store()
        return str(store.compare_set(_IDENTITY, "", uuid.uuid4().hex).decode())
    except distributed.DistError as error:
        raise StoreRendezvousError(f"the store of the process group does not answer: {error}") from error
    except (RuntimeError, NotImplementedError):  # a store that compares nothing: torch's fake one, say
        return f"process group of {size}"
