"""What callers know of a service: its replicas, as the controller last told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skipper.control.api.service import ReplicaState
from skipper.control.model.growing import quickly_pickled
from skipper.control.runtime.begin_log import BeginAddress

if TYPE_CHECKING:
    from skipper.control.api.views import ActorMesh


@quickly_pickled
@dataclass(frozen=True, slots=True)
class ReplicaSlot:
    """One replica of the service by its number, and who fills its place now.

    Attributes:
        number: of the replica; its successors have the same.
        state: of the one that is there.
        entry: the actor that takes its requests: its only one, or the `RequestSequencer`; None while it is `DOWN`.
        begins: where that writes down which requests it has begun; None while it is not up.
    """

    number: int
    state: ReplicaState
    entry: ActorMesh[Any] | None
    begins: BeginAddress | None = None


@quickly_pickled
@dataclass(frozen=True, slots=True)
class ReplicaTable:
    """The replicas of a service, in the order of their numbers.

    Attributes:
        version: grows with every change.
        slots: one for each replica.
    """

    version: int
    slots: tuple[ReplicaSlot, ...]
