"""`get_or_spawn_controller`: the job's one actor of a name."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

from skipper.control.api.actor import Actor
from skipper.control.api.mesh import ActorMesh
from skipper.control.model.actor import check_construction, interface_of
from skipper.control.model.future import Future, Promise
from skipper.control.model.shape import Extent, Shape
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.messages import ROOT_UID, OwnerRef, SpawnRequest
from skipper.control.runtime.requests import CONTROLLER
from skipper.control.wire.payload import pack_construction

if TYPE_CHECKING:
    from skipper.control.api import views

A = TypeVar("A", bound=Actor)
P = ParamSpec("P")


def get_or_spawn_controller(
    name: str, cls: Callable[P, A], /, *args: P.args, **kwargs: P.kwargs
) -> Future[views.ActorMesh[A]]:
    """The job's one actor called ``name``, from anywhere in the job; it is made by whoever asks first.

    It lives in the script's process and is owned by the script. If its ``__init__`` raises, those who asked get the
    error, and the next one to ask tries again.

    Raises:
        TypeError: the arguments do not fit ``__init__``.
        ActorDefinitionError: (a `TypeError`) the class cannot be spawned.
        PayloadError: (a `TypeError`) the class or an argument cannot be pickled.
    """
    interface = interface_of(cls)
    check_construction(cls, args, kwargs)
    body = pack_construction(cls, args, kwargs)
    process = runtime.current()
    request = SpawnRequest(secrets.randbits(63), name, Extent(), OwnerRef(process.root, ROOT_UID), None)
    answer = process.request(process.root, CONTROLLER, ((name, request, interface), body))
    result: Promise[views.ActorMesh[A]] = Promise()

    def open_mesh() -> views.ActorMesh[A]:
        found, found_interface = answer.get(0)
        whole = Shape.whole(Extent())
        mesh: ActorMesh[A] = ActorMesh(found.uid, found.name, (process.root,), Extent(), whole, found_interface)
        return cast("views.ActorMesh[A]", mesh)

    answer.add_done_callback(lambda _: result.settle_by(open_mesh))
    return result
