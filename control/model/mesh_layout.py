"""`MeshLayout`: what meshes of hosts, processes, actors and values have in common: named axes, and views along them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from skipper.control.model.shape import AxisSelection, Extent, Shape, Size

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

        The new axes of one are given with their sizes, ``mesh.split(gpus={"dp": 2, "tp": 4})``, or by their names with
        the sizes beside them, ``mesh.split(gpus=("dp", "tp"), tp=4)``; of each axis that is split like this the size of
        one part may be left out.

        Raises:
            KeyError: there is no such axis.
            ValueError: sizes do not multiply to that of the axis, or cannot be told; a size belongs to no new axis; two
                axes would have the same name.
            TypeError: a name is no string or a size is no int.
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
