"""`PairMesh`: a `ValueMesh` that is iterated as Monarch's is, in pairs of point and value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from skipper.control.model.shape import Shape
from skipper.control.model.value_mesh import ValueMesh

T_co = TypeVar("T_co", covariant=True)


class PairMesh(ValueMesh[T_co]):
    """What `Endpoint.call` gives for an endpoint that `control.monarch.endpoint` has marked.

    ``for point, value in mesh`` works. All else is as in `ValueMesh`: `values`, `items`, `item`, ``mesh[0]``.
    """

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return self.items()

    def __contains__(self, value: object) -> bool:
        return value in self._values

    def _with_view(self, view: Shape) -> PairMesh[T_co]:
        return PairMesh(view, [self._values[rank] for rank in view.ranks()])
