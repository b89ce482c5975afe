"""`ValueMesh`: one value for each member of a mesh."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, overload

from skipper.control.model.shape import Extent, MeshLayout, Point, Shape

T_co = TypeVar("T_co", covariant=True)


class ValueMesh(MeshLayout, Sequence[T_co], Generic[T_co]):
    """Values in rank order, addressed by rank, by point or by named coordinates.

    It prints, compares, indexes and iterates as the list of its values; `items` gives the points along with them. It is
    sliced, flattened, split and renamed as other meshes are, into a mesh of the same values.

    Example:
        ```python
        from skipper.control import ValueMesh

        losses = ValueMesh({"replicas": 2, "gpus": 2}, [0.1, 0.2, 0.3, 0.4])
        print(losses)  # [0.1, 0.2, 0.3, 0.4]
        print(losses.item(replicas=1, gpus=0))  # 0.3
        print(losses.slice(gpus=1))  # [0.2, 0.4]
        for point, loss in losses.items():
            print(dict(point), loss)
        ```
    """

    __slots__ = ("_values", "_view")

    def __init__(self, shape: Shape | Mapping[str, int], values: Iterable[T_co]) -> None:
        extent = shape.extent if isinstance(shape, Shape) else Extent.of(shape)
        self._view = Shape.whole(extent)
        self._values = list(values)
        if len(self._values) != extent.nelements:
            raise ValueError(f"{extent!r} has {extent.nelements} members, got {len(self._values)} values")

    @staticmethod
    def from_list(values: Iterable[T_co], *, extent: Mapping[str, int]) -> ValueMesh[T_co]:
        """A mesh of ``values``, given in row-major order.

        Raises:
            ValueError: the extent has another number of members.
        """
        return ValueMesh(Extent.of(extent), values)

    def values(self) -> list[T_co]:
        """The values in rank order, as a new list."""
        return list(self._values)

    def items(self) -> Iterator[tuple[Point, T_co]]:
        """Pairs of point and value, in rank order."""
        return zip(self.extent.points(), self._values, strict=True)

    def item(self, **coordinates: int) -> T_co:
        """The value at these coordinates; without any, the only value of a mesh of one.

        Raises:
            KeyError: the coordinates do not name exactly the mesh's axes.
            IndexError: a coordinate is outside its axis.
            ValueError: no coordinates were given and there are several values.
        """
        if not coordinates:
            if len(self._values) != 1:
                raise ValueError(f"item() without coordinates needs one value, {self.extent!r} has {len(self)}")
            return self._values[0]
        return self._values[self.extent.rank_of(coordinates)]

    def _with_view(self, view: Shape) -> ValueMesh[T_co]:
        return ValueMesh(view, [self._values[rank] for rank in view.ranks()])

    @overload
    def __getitem__(self, index: int | Mapping[str, int]) -> T_co: ...
    @overload
    def __getitem__(self, index: builtins.slice) -> list[T_co]: ...
    def __getitem__(self, index: int | Mapping[str, int] | builtins.slice) -> T_co | list[T_co]:
        if isinstance(index, Mapping):  # a point, or coordinates in a plain dict
            return self._values[self.extent.rank_of(index)]
        return self._values[index]

    def __iter__(self) -> Iterator[T_co]:
        return iter(self._values)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ValueMesh):
            return self.extent == other.extent and self._values == other._values
        if isinstance(other, list | tuple):
            return self._values == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have none

    def __repr__(self) -> str:
        return repr(self._values)


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
