"""The ownership tree as far as it lies in this process: owners, what they own, and the root."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from control.errors import ControlError
from control.failure import FailureKind, MeshFailure
from control.future import Future
from control.runtime.messages import ActorRef, Loss
from control.shape import Extent, Point
from control.wire.envelope import ProcessRef

if TYPE_CHECKING:
    from control.context import ActorInstance
    from control.runtime.process import Process


_log = logging.getLogger("control")

ROOT_UID = 1
"""The script's number among the actors of its process."""


class OwnedMesh(Protocol):
    """A mesh as its owner keeps it."""

    @property
    def uid(self) -> int:
        """Its number."""

    @property
    def name(self) -> str:
        """As given to ``spawn``."""

    @property
    def root_extent(self) -> Extent:
        """The extent of the whole mesh."""

    @property
    def root_members(self) -> Sequence[ProcessRef]:
        """The processes of all members, in rank order."""

    @property
    def has_actors(self) -> bool:
        """Whether its members are actors rather than processes."""

    def stop(self) -> Future[None]:
        """Stop every member."""


class Owner(Protocol):
    """An actor that may own meshes.

    Attributes:
        owned: its meshes by number.
        spawned: numbers of all meshes that it has ever owned.
        notices: where it is told of broadcasts that were not delivered, by the number of the mesh.
    """

    owned: dict[int, OwnedMesh]
    spawned: set[int]
    notices: dict[int, int]

    def owned_failed(self, failure: MeshFailure) -> None:
        """Take note of the failure of an owned mesh; from any thread."""


def mesh_of(owners: Iterable[Owner], uid: int) -> OwnedMesh | None:
    """The owned mesh with this number."""
    return next((owner.owned[uid] for owner in owners if uid in owner.owned), None)


def failures_of(owners: Iterable[Owner], process: ProcessRef, loss: Loss) -> Iterator[tuple[Owner, MeshFailure]]:
    """What each owner is to be told when a process has died.

    An owner learns of each of its actor meshes that had a member there, and of the mesh of processes itself only if
    it had none: one death is not told twice under two names.
    """
    for owner in owners:
        hit = [
            mesh for mesh in list(owner.owned.values()) if any(member.id == process.id for member in mesh.root_members)
        ]
        told = [mesh for mesh in hit if mesh.has_actors] or hit
        for mesh in told:
            rank = next(rank for rank, member in enumerate(mesh.root_members) if member.id == process.id)
            member = ActorRef(process, mesh.uid, mesh.name, mesh.root_extent.point(rank))
            failure = member.death(loss)
            if failure is not None and not mesh.has_actors:
                failure = dataclasses.replace(failure, actor_id=process.id, message=f"{member}: {loss.reason}")
            if failure is not None:
                yield owner, failure


class RootCell:
    """The script as an actor: the owner of what it spawns, itself owned by nobody.

    A process that has joined the job of another script has one, too.
    """

    def __init__(self, process: Process, name: str = "root") -> None:
        from control.context import ActorInstance

        self.process = process
        self.uid = ROOT_UID
        self.name = name
        self.actor_id = f"{name}@{process.me.name}"
        self.rank = Point(0, Extent())
        self.ref = ActorRef(process.me, ROOT_UID, self.name, self.rank)
        self.owned: dict[int, OwnedMesh] = {}
        self.spawned: set[int] = set()
        self.notices: dict[int, int] = {}
        self.instance: ActorInstance = ActorInstance(self, None)
        self._fault_lock = threading.Lock()
        self._is_ending = False

    def owned_failed(self, failure: MeshFailure) -> None:
        """Nobody below handled it: it goes to the fault hook, on a thread of its own so that the hook may wait."""
        if self._is_ending:
            # Actors that are not stopped yet may still talk to some that are: an orderly end stays one.
            _log.info("while the script ends: %s", failure)
            return
        threading.Thread(target=self._call_fault_hook, args=(failure,), name="control-fault", daemon=True).start()

    def fail_by_itself(self, kind: FailureKind, message: str, cause: MeshFailure | None) -> None:
        """Fail the script for something that it has done itself."""
        if not self.process.closing:
            self.owned_failed(
                MeshFailure(self.name, self.actor_id, self.rank, kind, f"the script: {message}", "", cause)
            )

    def abort(self, reason: str) -> None:
        """Fail the script."""
        message = f"the script aborted: {reason}"
        self.owned_failed(MeshFailure(self.name, self.actor_id, self.rank, FailureKind.ABORT, message))

    def stop_itself(self) -> Future[None]:
        """Stop all that the script owns."""
        from control.runtime.job import shutdown

        shutdown()
        return Future.of(None)

    def stop_owned(self, deadline: float) -> None:
        """Stop the script's meshes, up to a point in time (`time.monotonic`)."""
        self._is_ending = True
        # All at once, unlike those of an actor: a busy one must not use up the grace of the others.
        for end in [mesh.stop() for mesh in reversed(list(self.owned.values()))]:
            try:
                end.get(max(deadline - time.monotonic(), 0))
            except ControlError:
                continue  # it is busy, or its cleanup raised, which was logged: what is left is killed

    def _call_fault_hook(self, failure: MeshFailure) -> None:
        import control

        with self._fault_lock:
            if self.process.closing:
                return
            try:
                control.unhandled_fault_hook(failure)
            except SystemExit as leave:
                self._exit(leave.code if isinstance(leave.code, int) else int(leave.code is not None))
            except BaseException:  # noqa: BLE001  (a hook that fails must not hide that the job has failed)
                traceback.print_exc()
                self._exit(1)

    def _exit(self, code: int) -> None:
        from control.runtime.job import shutdown

        try:
            shutdown()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def unhandled_fault_hook(failure: MeshFailure) -> None:
    """What happens in the script when a failure has gone up the whole tree unhandled: print it and exit with code 1.

    Assign a function of your own to ``control.unhandled_fault_hook`` to do something else. It runs on a thread beside
    the script's; if it returns, the script goes on; if it raises `SystemExit`, the script ends with that code.
    """
    sys.stderr.write(f"control: unhandled failure, exiting with code 1\n{failure.report()}\n")
    sys.stderr.flush()
    raise SystemExit(1)
