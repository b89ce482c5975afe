"""`engine`: the tensor engine that `ProcMesh.activate` and similar methods use, found by its entry point.

The engine is in a layer above and needs torch; this package imports neither. The module that is installed as the entry
point ``tensor_engine`` of the group ``skipper`` is loaded at the first use.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from skipper.control.model.actor import ActorBase
from skipper.control.model.errors import EngineMissingError
from skipper.control.model.method_view import MethodView
from skipper.control.runtime import current_runtime, front_end, script_exit

M = TypeVar("M")
T = TypeVar("T")

_GROUP, _NAME = "skipper", "tensor_engine"


class OnWorkersError(Exception):
    """Raised when an object on the workers of the engine, such as a tensor of a mesh, is pickled.

    If that happens to the arguments of a call or of ``spawn``, these go through the engine.
    """


@dataclass(frozen=True, slots=True)
class OnMesh:
    """The tensors on one mesh, out of a set of tensors.

    Attributes:
        mesh: A `ProcMesh`.
        names: The names of the tensors.
    """

    mesh: Any
    names: tuple[str, ...]


def is_at_work() -> bool:
    """Whether there may be tensors of meshes: the engine has been loaded."""
    return engine.cache_info().currsize > 0


def by_mesh(tensors: Mapping[str, object]) -> Sequence[OnMesh]:
    """The tensors on the engine's workers, out of named tensors (or other objects), by mesh.

    This loads nothing: if the engine is not loaded there are none.
    """
    return engine().by_mesh(tensors) if is_at_work() else ()


def is_for_engine(error: BaseException) -> bool:
    """Whether arguments could not be pickled because one of them is on the engine's workers."""
    return isinstance(error.__cause__, OnWorkersError)


class TensorEngine(Protocol):
    """What a tensor engine does for this package; the meshes are `ProcMesh`, the endpoints `Endpoint`."""

    def activate(self, mesh: M) -> AbstractContextManager[M]:
        """See `ProcMesh.activate`."""

    def place(self, mesh: object, what: T) -> T:
        """See `ProcMesh.place`."""

    def rank_tensor(self, mesh: object, axis: str) -> Any:
        """See `ProcMesh.rank_tensor`."""

    def rank_tensors(self, mesh: object) -> dict[str, Any]:
        """See `ProcMesh.rank_tensors`."""

    def by_mesh(self, tensors: Mapping[str, object]) -> Sequence[OnMesh]:
        """See the function of this name. No process may be in two of the meshes, and all tensors must be sendable.

        Raises:
            Exception: One of these is not so, or this is called by a function that is being compiled; nothing was sent.
        """

    def rref(self, endpoint: MethodView, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Endpoint.rref`."""

    def send(self, endpoint: MethodView, adverb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what ``endpoint.adverb(*args, **kwargs)`` does, with tensors of a mesh among the arguments.

        Each actor gets its own shard, as a plain tensor, in order with the operations of the engine.
        """

    def spawn(
        self, mesh: object, name: str, cls: type[ActorBase], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do what `ProcMesh.spawn` does, in the same way."""


def failed_unseen() -> None:
    """Note, at the latest in an `atexit` handler, that an operation failed and the script has not seen the error.

    The script then does not end with exit code 0; the engine reports the error. At a prompt, in a notebook and under
    pytest this has no effect.
    """
    if current_runtime.is_running() and current_runtime.current().root_actor is not None and front_end.is_script():
        script_exit.fail()


@functools.cache
def engine() -> TensorEngine:
    """The tensor engine that is installed.

    Raises:
        EngineMissingError: there is none.
        ImportError: it cannot be imported, for example because torch is missing.
    """
    from importlib.metadata import distributions  # most processes do not need it

    # Not by `entry_points`, which stops at the first distribution of a name: an earlier build may have left one in a
    # checkout.
    for distribution in distributions():
        for point in distribution.entry_points.select(group=_GROUP, name=_NAME):
            return cast(TensorEngine, point.load())
    raise EngineMissingError(
        f"no tensor engine is installed: nothing names itself {_NAME!r} in the entry points of {_GROUP!r} "
        "(the distribution skipper-mesh does: install it, also where it runs from a checkout)"
    )
