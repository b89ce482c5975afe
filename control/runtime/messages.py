"""What the runtimes of two processes tell each other, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from control.shape import Extent
from control.wire.envelope import Envelope, ProcessRef


@dataclass(frozen=True, slots=True)
class Mail:
    """An envelope for an actor, and who sent it."""

    sender: ProcessRef
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class OwnerRef:
    """The actor that owns a mesh."""

    process: ProcessRef
    uid: int


@dataclass(frozen=True, slots=True)
class SpawnRequest:
    """What a process is told to make an actor; its class and arguments travel beside it, packed.

    Attributes:
        uid: number of the mesh, under which its members are found in their processes.
        name: as given to ``spawn``.
        extent: of the whole mesh.
        owner: the actor that spawned it.
    """

    uid: int
    name: str
    extent: Extent
    owner: OwnerRef
