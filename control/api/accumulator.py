"""`Accumulator`: the answers of a mesh, folded into one value."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

from skipper.control.api.endpoint import Endpoint
from skipper.control.model.future import Future, Promise

if TYPE_CHECKING:
    from skipper.control.api.views import P_any
else:
    P_any = ParamSpec("P_any")

A = TypeVar("A")
R = TypeVar("R")


class Accumulator(Generic[A, P_any]):
    """Calls an endpoint of every actor of a mesh and folds what they answer into one value.

    Args:
        endpoint: such as ``mesh.loss``.
        identity: the value to begin with; ``combine`` must not change it, since every call begins with it.
        combine: ``combine(value so far, answer)`` gives the new value. Answers are combined in the order in which they
            come, so the order should not matter to it.
    """

    def __init__(self, endpoint: Endpoint[P_any, R], identity: A, combine: Callable[[A, R], A]) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._combine = combine

    def accumulate(self, *args: P_any.args, **kwargs: P_any.kwargs) -> Future[A]:
        """Call every actor.

        Returns:
            The future of the combined value, which ends once every actor has answered, or cannot. If several fail,
            it raises the error that came first. ``combine`` runs in the thread that asks first.

        Raises:
            TypeError: the arguments do not fit the endpoint's signature.
            PayloadError: an argument cannot be pickled.
        """
        answers = list(self._endpoint.stream(*args, **kwargs))
        result: Promise[A] = Promise()

        def fold() -> A:
            value = self._identity
            for answer in answers:
                value = self._combine(value, answer.get(0))
            return value

        answers[-1].add_done_callback(lambda _: result.settle_by(fold))  # the last of them ends when all have
        return result

    if not TYPE_CHECKING:

        def __class_getitem__(cls, parameters: object) -> types.GenericAlias:
            """``Accumulator[float]``: the parameters of the endpoint need not be named."""
            return types.GenericAlias(cls, parameters)

    def __repr__(self) -> str:
        return f"<Accumulator of {self._endpoint!r}>"
