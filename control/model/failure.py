"""`MeshFailure`: what an owner gets when a member of one of its meshes fails."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from skipper.control.model.shape import Point


class FailureKind(enum.Enum):
    """What happened, at the root of a failure.

    The example of `RecoveryPolicy` shows one.
    """

    CONSTRUCTION = "construction"
    """``__init__`` raised."""
    EXCEPTION = "exception"
    """An endpoint raised and no caller waited for its reply, or it raised something that always ends its actor; or a
    supervision hook raised."""
    UNDELIVERED = "undelivered"
    """The actor broadcast a message that could not be delivered."""
    ABORT = "abort"
    """The actor gave up by itself (``actor_instance.abort``)."""
    PROCESS = "process"
    """The process ended."""
    UNREACHABLE = "unreachable"
    """The process sent no heartbeat for too long, or the link to it broke."""
    OWNED = "owned"
    """A mesh that the actor owns failed and the actor did not handle it."""


@dataclass(frozen=True, slots=True)
class MeshFailure:
    """The failure of one member of a mesh, as its owner learns of it.

    Attributes:
        mesh_name: name of the mesh, as given to ``spawn``.
        actor_id: the failed actor, or the process' id for a mesh of processes.
        rank: its position in the mesh.
        kind: what happened.
        message: one line for people.
        details: a remote traceback or other text; may be empty.
        cause: the failure below it in the ownership tree that led to this one.
        source: id of the process that ended; empty if this is not the end of a process.
        exception: class of the exception that was raised; empty if there was none.

    Example:
        ```python
        import os

        from skipper.control import Actor, MeshFailure, SupervisionError, endpoint, this_host

        class Worker(Actor):
            @endpoint
            def crash(self) -> None:
                os._exit(3)

        class Owner(Actor):
            def __init__(self) -> None:
                self.failures: list[MeshFailure] = []
                self.workers = this_host().spawn_procs({"gpus": 2}).spawn("workers", Worker)

            def __supervise__(self, failure: MeshFailure) -> bool:
                self.failures.append(failure)
                return True  # handled

            @endpoint
            def provoke(self) -> tuple[str, int]:
                try:
                    self.workers.slice(gpus=1).crash.call_one().get()
                except SupervisionError as error:
                    assert error.failure is not None and error.failure.rank is not None
                    return error.failure.mesh_name, error.failure.rank.rank
                return "", -1

        owner = this_host().spawn_procs().spawn("owner", Owner)
        print(owner.provoke.call_one().get())  # ('workers', 1)
        ```
    """

    mesh_name: str
    actor_id: str
    rank: Point | None
    kind: FailureKind
    message: str
    details: str = ""
    cause: MeshFailure | None = None
    source: str = ""
    exception: str = ""

    def root_cause(self) -> MeshFailure:
        """The failure that started it: the first error."""
        return self._chain()[-1]

    def origin(self) -> str:
        """The process or actor that failed first: the same for all failures that its end has caused."""
        first = self.root_cause()
        return first.source or first.actor_id

    def ids(self) -> frozenset[str]:
        """Ids of the actors and the process that have failed, from the first to this one."""
        return frozenset(name for failure in self._chain() for name in (failure.actor_id, failure.source) if name)

    def headline(self) -> str:
        """The first error, and what a ``__supervise__`` further up the tree has raised because of it."""
        chain = self._chain()
        raised = [failure.message for failure in chain[:-1] if failure.kind is FailureKind.EXCEPTION]
        return "; ".join([chain[-1].message, *reversed(raised)])

    def is_recoverable(self) -> bool:
        """Whether spawning the mesh again can be expected to help.

        False if ``__init__`` raised: the same arguments would fail in the same way.
        """
        return self.root_cause().kind is not FailureKind.CONSTRUCTION

    def report(self) -> str:
        """The full report: the first error as the headline, then its details and the path up the tree."""
        chain = self._chain()
        first = chain[-1]
        lines = [first.message]
        if first.details:
            lines += [f"  | {line}" for line in first.details.rstrip().splitlines()]
        lines += [f"  which no owner below {above.mesh_name!r} handled: {above.message}" for above in chain[-2::-1]]
        return "\n".join(lines)

    def _chain(self) -> list[MeshFailure]:
        """This failure, its cause, and so on, down to the first."""
        chain = [self]
        while (cause := chain[-1].cause) is not None:
            chain.append(cause)
        return chain

    def __str__(self) -> str:
        return self.report()
