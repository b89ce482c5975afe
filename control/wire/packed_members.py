"""`PackedMembers`: the processes of a large mesh, which a reference to the mesh carries packed."""

from __future__ import annotations

import pickle
import zlib
from typing import Any, TypeAlias

from skipper.control.wire.process_ref import ProcessRef

_FEW = 32
"""The members of a smaller mesh travel as they are."""


class PackedMembers:
    """Many processes, in rank order. They travel compressed, and are unpacked where they are needed.

    A reference to a mesh of 1,024, cast to all of its members, would otherwise be unpickled 1,024 times, each time with
    1,024 processes. Most of the receivers keep it for one of them, or for later.
    """

    __slots__ = ("_packed", "_refs")

    def __init__(self, refs: tuple[ProcessRef, ...] | None, packed: bytes = b"") -> None:
        self._refs = refs
        self._packed = packed

    @property
    def refs(self) -> tuple[ProcessRef, ...]:
        """The processes; of one mesh always the same object."""
        if self._refs is None:
            self._refs = pickle.loads(zlib.decompress(self._packed))
        return self._refs

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._packed:
            self._packed = zlib.compress(pickle.dumps(self._refs, pickle.HIGHEST_PROTOCOL), 1)
        return (PackedMembers, (None, self._packed))


AnyMembers: TypeAlias = tuple[ProcessRef, ...] | PackedMembers


def to_send(members: AnyMembers) -> AnyMembers:
    """What a reference to a mesh holds and carries: its members as they are, or packed if there are many."""
    return members if isinstance(members, PackedMembers) or len(members) < _FEW else PackedMembers(members)


def opened(members: AnyMembers) -> tuple[ProcessRef, ...]:
    """The processes."""
    return members.refs if isinstance(members, PackedMembers) else members
