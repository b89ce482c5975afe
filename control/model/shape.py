"""Extents, points and shapes: how the members of a mesh are laid out and addressed by named axes."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeAlias, TypeVar

from skipper.control.model.growing import quickly_pickled

AxisSelection: TypeAlias = "int | slice"


@quickly_pickled
@dataclass(frozen=True, slots=True, eq=False)
class Extent(Mapping[str, int]):
    """The named axes of a mesh and their sizes, in row-major order; a mapping from axis to size.

    An extent without axes describes exactly one member.

    Example:
        ```python
        from skipper.control import Extent

        extent = Extent(("hosts", "gpus"), (2, 4))
        print(extent.nelements)  # 8
        print(extent["gpus"])  # 4
        print(extent.point(5).rank, dict(extent.point(5)))  # 5 {'hosts': 1, 'gpus': 1}
        ```
    """

    axes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(self.axes))
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if len(self.axes) != len(self.sizes):
            raise ValueError(f"{len(self.axes)} axes {self.axes} do not match {len(self.sizes)} sizes {self.sizes}")
        if len(set(self.axes)) != len(self.axes):
            raise ValueError(f"an axis is named twice in {self.axes}")
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if not isinstance(axis, str) or not axis:
                raise TypeError(f"an axis is named by a non-empty string, not {axis!r}")
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"the size of axis {axis!r} must be an int, not {size!r}")
            if size < 1:
                raise ValueError(f"axis {axis!r} needs a size of at least 1, got {size}")

    @staticmethod
    def of(sizes: Mapping[str, int]) -> Extent:
        """The extent of a plain mapping such as ``{"hosts": 2, "gpus": 8}``.

        Raises:
            ValueError: an axis has a size below 1.
            TypeError: a name is not a string or a size is not an int.
        """
        if isinstance(sizes, Extent):
            return sizes
        return Extent(tuple(sizes), tuple(sizes.values()))

    @property
    def nelements(self) -> int:
        """The number of members."""
        return math.prod(self.sizes)

    def point(self, rank: int) -> Point:
        """The point with this row-major rank.

        Raises:
            IndexError: there is no such rank.
        """
        return Point(rank, self)

    def points(self) -> Iterator[Point]:
        """Every point, in rank order."""
        return map(_point_within, range(self.nelements), itertools.repeat(self))

    @property
    def labels(self) -> tuple[str, ...]:
        """The same as ``axes``, by the name that Monarch has for it."""
        return self.axes

    def parts(self, given: Mapping[str, Mapping[str, int] | Sequence[str] | int]) -> dict[str, dict[str, int]]:
        """Read what `MeshLayout.split` was given: the new axes of each axis that is split, with their sizes.

        Raises:
            KeyError: there is no such axis.
            ValueError: sizes do not multiply to that of an axis, or cannot be inferred; a size belongs to no new axis.
            TypeError: a size is not an int.
        """
        sizes = {name: size for name, size in given.items() if name not in self.axes}
        for name, size in sizes.items():
            if isinstance(size, Mapping | Sequence):
                raise KeyError(f"no axis {name!r} in {self!r}")
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"the size of the new axis {name!r} must be an int, not {size!r}")
        parts = {axis: _part(axis, self[axis], into, sizes) for axis, into in given.items() if axis in self.axes}
        for name in sizes:
            if not any(name in part for part in parts.values()):
                raise ValueError(f"{name}={sizes[name]} is the size of no new axis, and {self!r} has no such axis")
        return parts

    def rank_of(self, coordinates: Mapping[str, int]) -> int:
        """The row-major rank of the point with exactly these coordinates.

        Raises:
            KeyError: the axes are not this extent's.
            IndexError: a coordinate is outside its axis.
        """
        if set(coordinates) != set(self.axes):
            raise KeyError(f"coordinates {dict(coordinates)} do not name the axes {self.axes}")
        rank = 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            rank = rank * size + _index(axis, coordinates[axis], size)
        return rank

    def __getitem__(self, axis: str) -> int:
        try:
            return self.sizes[self.axes.index(axis)]
        except ValueError:
            raise KeyError(axis) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Extent):
            return self.axes == other.axes and self.sizes == other.sizes
        if isinstance(other, Mapping):
            return list(self.items()) == list(other.items())
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self.axes, self.sizes))

    def __repr__(self) -> str:
        return repr(dict(self))


class Size(int):
    """The number of members; called with one or several axes, it gives the number along these.

    So ``mesh.size`` is the number, and ``mesh.size()`` and ``mesh.size("gpus")`` work as they do in Monarch.
    """

    _extent: Extent

    @classmethod
    def of(cls, extent: Extent) -> Size:
        """The size of an extent."""
        size = cls(extent.nelements)
        size._extent = extent
        return size

    def __call__(self, axes: str | Sequence[str] | None = None) -> int:
        """The number of members along one axis, along several, or (None) of all.

        Raises:
            KeyError: there is no such axis.
        """
        if axes is None:
            return int(self)
        return math.prod(self._extent[axis] for axis in ((axes,) if isinstance(axes, str) else axes))

    def __reduce__(self) -> tuple[Any, ...]:
        return (Size.of, (self._extent,))


@quickly_pickled
@dataclass(frozen=True, slots=True, eq=False)
class Point(Mapping[str, int]):
    """One position in an extent: a mapping from axis to index that also knows its row-major ``rank``.

    Example:
        ```python
        from skipper.control import Extent

        point = Extent(("hosts", "gpus"), (2, 4)).point(6)
        print(point["hosts"], point["gpus"], point.rank)  # 1 2 6
        ```
    """

    rank: int
    extent: Extent

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.extent.nelements:
            raise IndexError(f"rank {self.rank} is outside {self.extent!r} ({self.extent.nelements} members)")

    @property
    def size(self) -> Size:
        """The number of members of the whole extent; ``point.size("gpus")`` is the size of one axis."""
        return Size.of(self.extent)

    def __getitem__(self, axis: str) -> int:
        try:
            position = self.extent.axes.index(axis)
        except ValueError:
            raise KeyError(axis) from None
        inner = math.prod(self.extent.sizes[position + 1 :])
        return self.rank // inner % self.extent.sizes[position]

    def __iter__(self) -> Iterator[str]:
        return iter(self.extent.axes)

    def __len__(self) -> int:
        return len(self.extent.axes)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Point):
            return self.rank == other.rank and self.extent == other.extent
        if isinstance(other, Mapping):
            return dict(self) == dict(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self.rank, self.extent))

    def __repr__(self) -> str:
        return repr(dict(self))


_set_rank, _set_extent = (vars(Point)[name].__set__ for name in ("rank", "extent"))


def _point_within(rank: int, extent: Extent) -> Point:
    """A point that is known to be within its extent."""
    point = Point.__new__(Point)
    _set_rank(point, rank)
    _set_extent(point, extent)
    return point


@quickly_pickled
@dataclass(frozen=True, slots=True)
class Shape:
    """A strided view of the members of a root mesh: which of its ranks belong to the view, and how they are laid out.

    Attributes:
        extent: axes and sizes of the view.
        offset: root rank of the view's first member.
        strides: distance in root ranks between neighbours along each axis.

    Example:
        ```python
        from skipper.control import Extent, Shape

        whole = Shape.whole(Extent(("hosts", "gpus"), (2, 4)))
        print(whole.select({"gpus": 1}).ranks())  # (1, 5)
        print(whole.select({"hosts": 1, "gpus": slice(0, 2)}).ranks())  # (4, 5)
        print(whole.flatten("ranks").extent.sizes)  # (8,)
        ```
    """

    extent: Extent
    offset: int
    strides: tuple[int, ...]

    @staticmethod
    def whole(extent: Extent) -> Shape:
        """The view that is the whole mesh."""
        strides = tuple(math.prod(extent.sizes[axis + 1 :]) for axis in range(len(extent.sizes)))
        return Shape(extent, 0, strides)

    def ranks(self) -> tuple[int, ...]:
        """The root ranks of the view's members, in the view's row-major order."""
        ranks = [self.offset]
        for size, stride in zip(self.extent.sizes, self.strides, strict=True):
            ranks = [rank + step * stride for rank in ranks for step in range(size)]
        return tuple(ranks)

    def select(self, selection: Mapping[str, AxisSelection]) -> Shape:
        """Narrow the view: an int picks one index and drops the axis, a slice keeps a range of it.

        Raises:
            KeyError: the view has no such axis.
            IndexError: an index is outside its axis, or a slice selects nothing.
            TypeError: a selection is neither an int nor a slice.
        """
        self._check_axes(selection)
        offset = self.offset
        kept: list[tuple[str, int, int]] = []
        for axis, size, stride in zip(self.extent.axes, self.extent.sizes, self.strides, strict=True):
            chosen: Any = selection.get(axis, slice(None))
            if isinstance(chosen, slice):
                steps = range(*chosen.indices(size))
                if not steps:
                    raise IndexError(f"{axis}={chosen} selects nothing of {size} members")
                offset += steps.start * stride
                kept.append((axis, len(steps), steps.step * stride))
            else:
                offset += _index(axis, chosen, size) * stride
        axes, sizes, strides = zip(*kept, strict=True) if kept else ((), (), ())
        return Shape(Extent(axes, sizes), offset, strides)

    def rename(self, names: Mapping[str, str]) -> Shape:
        """Give axes other names, keeping their order.

        Raises:
            KeyError: the view has no such axis.
            ValueError: two axes would share a name.
        """
        self._check_axes(names)
        axes = tuple(names.get(axis, axis) for axis in self.extent.axes)
        return Shape(Extent(axes, self.extent.sizes), self.offset, self.strides)

    def flatten(self, name: str) -> Shape:
        """Merge all axes into one called ``name``.

        Raises:
            ValueError: the members are not evenly spaced in the root mesh, so that one axis cannot describe them.
        """
        size, stride = 1, 1
        for inner_size, inner_stride in zip(reversed(self.extent.sizes), reversed(self.strides), strict=True):
            if inner_size == 1:
                continue
            if size == 1:
                stride = inner_stride
            elif inner_stride != stride * size:
                raise ValueError(
                    f"{self.extent!r} with strides {self.strides} is not evenly spaced: flatten before slicing"
                )
            size *= inner_size
        return Shape(Extent((name,), (size,)), self.offset, (stride,))

    def split(self, axis: str, into: Mapping[str, int]) -> Shape:
        """Split ``axis`` into several, outermost first; the product of their sizes must be the axis' size.

        Raises:
            KeyError: the view has no such axis.
            ValueError: the sizes do not multiply to the axis' size.
        """
        return self.split_axes({axis: into})

    def split_axes(self, parts: Mapping[str, Mapping[str, int]]) -> Shape:
        """`split`, of several axes at once.

        Raises:
            KeyError: the view has no such axis.
            ValueError: the sizes do not multiply to that of their axis, or two axes would share a name.
        """
        self._check_axes(parts)
        for axis, into in parts.items():
            if Extent.of(into).nelements != self.extent[axis]:
                raise ValueError(f"{dict(into)} does not multiply to {axis}={self.extent[axis]}")
        axes: tuple[str, ...] = ()
        sizes: tuple[int, ...] = ()
        strides: tuple[int, ...] = ()
        for name, size, stride in zip(self.extent.axes, self.extent.sizes, self.strides, strict=True):
            inner = Shape.whole(Extent.of(parts.get(name, {name: size})))
            axes += inner.extent.axes
            sizes += inner.extent.sizes
            strides += tuple(stride * step for step in inner.strides)
        return Shape(Extent(axes, sizes), self.offset, strides)

    def _check_axes(self, named: Iterable[str]) -> None:
        for axis in named:
            if axis not in self.extent:
                raise KeyError(f"no axis {axis!r} in {self.extent!r}")


L = TypeVar("L", bound="MeshLayout")


class MeshLayout:
    """Members laid out along named axes. A subclass has its members in row-major order of its ``_view``."""

    __slots__ = ()

    _view: Shape

    @property
    def extent(self) -> Extent:
        """Axes and sizes."""
        return self._view.extent

    @property
    def size(self) -> Size:
        """The number of members; ``mesh.size("gpus")`` is that along an axis."""
        return Size.of(self.extent)

    @property
    def sizes(self) -> dict[str, int]:
        """Axes and sizes, as a plain dict."""
        return dict(self.extent)

    def slice(self: L, **selection: AxisSelection) -> L:
        """A part of the mesh: an int picks an index and drops the axis, a slice keeps a range.

        Raises:
            KeyError: there is no such axis.
            IndexError: the selection is empty or out of range.
            TypeError: a selection is neither an int nor a slice.
        """
        return self._with_view(self._view.select(selection))

    def rename(self: L, **names: str) -> L:
        """The same members with other names for axes: ``mesh.rename(gpus="tp")``.

        Raises:
            KeyError: there is no such axis.
            ValueError: two axes would have the same name.
            TypeError: a name is no string.
        """
        return self._with_view(self._view.rename(names))

    def flatten(self: L, name: str) -> L:
        """The same members along one axis called ``name``.

        Raises:
            ValueError: the members of this slice are not evenly spaced.
            TypeError: the name is no string.
        """
        return self._with_view(self._view.flatten(name))

    def split(self: L, **axes: Mapping[str, int] | Sequence[str] | int) -> L:
        """The same members with axes split up, outermost first.

        The new axes of one are given with their sizes, ``mesh.split(gpus={"dp": 2, "tp": 4})``, or by their names, with
        the sizes as further arguments, ``mesh.split(gpus=("dp", "tp"), tp=4)``. In the second form, one of the new axes
        may lack its size.

        Raises:
            KeyError: there is no such axis.
            ValueError: sizes do not multiply to that of the axis, or cannot be inferred; a size has no new axis; two
                axes would have the same name.
            TypeError: a name is not a string or a size is not an int.
        """
        return self._with_view(self._view.split_axes(self.extent.parts(axes)))

    def _with_view(self: L, view: Shape) -> L:
        raise NotImplementedError

    def __call__(self: L, **selection: AxisSelection) -> L:
        """`slice`, in short: ``mesh(gpus=0)``."""
        return self.slice(**selection)

    def __len__(self) -> int:
        """The number of members."""
        return self.extent.nelements


def _part(axis: str, size: int, into: object, sizes: Mapping[str, object]) -> dict[str, int]:
    """The new axes of ``axis`` with their sizes; at most one of those given by name may lack its size."""
    if isinstance(into, Mapping):
        return dict(into)
    if isinstance(into, str) or not isinstance(into, Sequence):
        raise ValueError(f"{axis!r} is split into several axes, (name, ...) or {{name: size, ...}}, not into {into!r}")
    if len(set(into)) != len(into):
        raise ValueError(f"an axis is named twice in {axis}={tuple(into)}")
    open_names = [name for name in into if name not in sizes]
    if len(open_names) > 1:
        raise ValueError(
            f"the sizes of {' and '.join(open_names)} cannot both be inferred from {axis}={size}: give one, such as "
            f"{open_names[0]}=2"
        )
    known: dict[str, int] = {name: sizes[name] for name in into if name in sizes}  # type: ignore[misc]  # `parts` saw
    product = math.prod(known.values())
    if open_names and (product < 1 or size % product):
        raise ValueError(f"{axis}={size} cannot be divided by {known}")
    return {name: known[name] if name in known else size // product for name in into}


def _index(axis: str, index: object, size: int) -> int:
    """``index`` along ``axis`` counted from the front, negative ones from the back."""
    if type(index) is not int:  # nearly all indices are plain ints; a check of a protocol takes microseconds
        if isinstance(index, bool) or not isinstance(index, SupportsIndex):
            raise TypeError(f"axis {axis!r} is indexed by an int, not {index!r}")
        index = operator.index(index)
    if not -size <= index < size:
        raise IndexError(f"{axis}={index} is out of range for {size} members")
    return index % size
