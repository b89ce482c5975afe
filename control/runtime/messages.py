"""What the runtimes of two processes send each other, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from skipper.control.model.failure import FailureKind, MeshFailure
from skipper.control.model.growing import growing
from skipper.control.model.shape import Extent, Point
from skipper.control.wire.addresses import host_of
from skipper.control.wire.messages import Call, Kind, Payload, ProcessRequest
from skipper.control.wire.process_ref import NO_SIGN_OF_LIFE, ProcessRef

ROOT_UID = 1
"""The script's number among the actors of its process."""


class CastNode(Protocol):
    """The node of a tree through which a message has come: answers and credit go back through it."""

    @property
    def origin(self) -> ProcessRef:
        """The process that casts."""

    def reply(self, number: int, call: Call, kind: Kind, payload: Payload) -> bool:
        """Answer a cast through the tree; False if the answer has to go directly. From any thread."""

    def handled(self, number: int, nbytes: int) -> None:
        """Note that a cast has left the actor's mailbox; from any thread, in any order."""


@dataclass(frozen=True, slots=True)
class CastPath:
    """The path of a message down a tree.

    Attributes:
        relay: the node of the tree in this process.
        number: of the cast.
    """

    relay: CastNode
    number: int


@dataclass(slots=True, eq=False)  # not frozen: there is one for each call, and a frozen one takes three times as long
class Mail:
    """A message for an actor or for this process, and who sent it. It does not change.

    Attributes:
        sender: the process whose code sent it.
        message: what was sent.
        cast: its path down a tree; None if it came directly.
    """

    sender: ProcessRef
    message: Call | ProcessRequest
    cast: CastPath | None = None


@growing
@dataclass(frozen=True, slots=True)
class ReplyAddress:
    """Where a port is: a number in a process; ``rank`` tells apart the senders that share a number."""

    process: ProcessRef
    number: int
    rank: int


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a process.

    Attributes:
        reason: for people.
        kind: the kind of failure; None if it ended in good order, which is no failure.
        process_id: of that process, where it is known.
    """

    reason: str
    kind: FailureKind | None = None
    process_id: str = ""

    @staticmethod
    def of(peer: ProcessRef, reason: str, *, in_good_order: bool) -> Loss:
        """The loss that is known for the end of a process."""
        kind = FailureKind.UNREACHABLE if NO_SIGN_OF_LIFE in reason else FailureKind.PROCESS
        host = host_of(peer.address)
        where = f" on host {host}" if host and host not in peer.name else ""
        return Loss(f"process {peer.name}{where} is gone: {reason}", None if in_good_order else kind, peer.id)


@growing
@dataclass(frozen=True, slots=True)
class ActorRef:
    """One actor, as others refer to it.

    Attributes:
        process: where it lives.
        uid: number of its mesh.
        mesh_name: as given to ``spawn``.
        rank: its position in the whole mesh.
    """

    process: ProcessRef
    uid: int
    mesh_name: str
    rank: Point

    @property
    def actor_id(self) -> str:
        """Unique in the job."""
        return f"{self.mesh_name}[{self.rank.rank}]@{self.process.name}#{self.uid & 0xFFFFFF:06x}"

    def death(self, loss: Loss) -> MeshFailure | None:
        """Its failure, if the loss of its process is one."""
        if loss.kind is None:
            return None
        message = f"actor {self} died: {loss.reason}"
        return MeshFailure(self.mesh_name, self.actor_id, self.rank, loss.kind, message, source=loss.process_id)

    def __str__(self) -> str:
        return f"{self.mesh_name}{self.rank!r}" if self.rank else self.mesh_name


@growing
@dataclass(frozen=True, slots=True)
class OwnerRef:
    """The actor that owns a mesh."""

    process: ProcessRef
    uid: int


@growing
@dataclass(frozen=True, slots=True)
class Creator:
    """The actor that spawned another actor.

    The example of `Context` shows one.

    Attributes:
        name: name of its mesh; ``root`` for the script.
        actor_id: unique in the job.
        rank: its position in its mesh.
        proc_id: the id of its process.
        creator: the actor that spawned it; None for the script.
    """

    name: str
    actor_id: str
    rank: Point
    proc_id: str
    creator: Creator | None


@growing
@dataclass(frozen=True, slots=True)
class SpawnRequest:
    """The request to a process to make an actor; its class and arguments travel with it, packed.

    Attributes:
        uid: number of the mesh, by which its members are found in their processes.
        name: as given to ``spawn``.
        extent: of the whole mesh.
        owner: the actor that owns it.
        creator: the actor that spawned it, for the actor's context; None if the script is to fill itself in.
    """

    uid: int
    name: str
    extent: Extent
    owner: OwnerRef
    creator: Creator | None


@growing
@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """The processes to launch on one host.

    Attributes:
        members: the processes.
        env: their variables.
        bootstrap: packed, as in `WorkerConfig`.
        proc_bind: what each is bound to (see `Binding.of`).
    """

    members: tuple[ProcessRef, ...]
    env: Mapping[str, str]
    bootstrap: tuple[bytes, ...]
    proc_bind: Sequence[Mapping[str, str]]
