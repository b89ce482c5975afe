"""What callers know of a service: its replicas, in the controller's last report."""

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
    """One number of a replica of the service, and the replica that has it now.

    Attributes:
        number: number of the replica; its successors have the same.
        state: state of the present replica.
        entry: the actor that takes its requests: its only one, or the `RequestSequencer`; None while it is `DOWN`.
        begins: where the entry records which requests it has begun; None while it is not up.
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
