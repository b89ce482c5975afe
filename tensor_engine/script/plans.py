"""Which workers take part in a reduction or a move, computed once for each kind."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from skipper.control import ProcMesh
from skipper.tensor_engine.errors import MeshMismatchError
from skipper.tensor_engine.shared.metadata import TensorMetadata
from skipper.tensor_engine.worker.communication import Move, Reduction, WorkerNumbers

_PLANS = 1024
"""How many reductions and moves are cached. An evicted one is sent to the workers again."""


def mesh_axes(mesh: ProcMesh, axes: str | Sequence[str]) -> tuple[str, ...]:
    """Axes of a mesh, as a tuple.

    Raises:
        KeyError: the mesh has no such axis.
        ValueError: no axis is named although there are some, or one is named twice.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    if not names and mesh.extent:
        raise ValueError(f"no axis of {mesh.extent!r} is named")
    for axis in names:
        if axis not in mesh.extent:
            raise KeyError(f"no axis {axis!r} in {mesh.extent!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"an axis is named twice: {', '.join(names)}")
    return names


def ranks_along(mesh: ProcMesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """For each place on the other axes, the ranks along ``axes``, the last one fastest."""
    groups: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    for rank, point in zip(mesh.ranks, mesh.extent.points(), strict=True):
        others = tuple(point[axis] for axis in mesh.extent if axis not in axes)
        groups.setdefault(others, []).append((tuple(point[axis] for axis in axes), rank))
    return tuple(tuple(rank for _, rank in sorted(members)) for members in groups.values())


@functools.lru_cache(maxsize=_PLANS)
def plan_reduction(
    numbers: WorkerNumbers,
    mesh: ProcMesh,
    axes: tuple[str, ...],
    kind: str,
    scatter: bool,
    expected: TensorMetadata,
    onto: ProcMesh | None,
) -> Reduction:
    """Which ranks reduce together, along ``axes``, the last one fastest; ``onto`` is the slice that gets the result.

    Raises:
        MeshMismatchError: ``onto`` is not a part of ``mesh``.
        ValueError: dim 0 cannot be cut evenly.
    """
    if onto is not None and not (onto.uid == mesh.uid and set(onto.ranks) <= set(mesh.ranks)):
        raise MeshMismatchError(f"mesh= has to be a slice of the tensor's mesh, {mesh!r}; {onto!r} is not one")
    ordered = tuple(tuple(numbers.by_rank[rank] for rank in ranks) for ranks in ranks_along(mesh, axes))
    if scatter and (not expected.shape or expected.shape[0] % len(ordered[0])):
        raise ValueError(f"scatter= cuts dim 0 of {expected!r} into {len(ordered[0])} parts, which does not go evenly")
    to = None if onto is None else frozenset(numbers.by_rank[rank] for rank in onto.ranks)
    return Reduction(ordered, kind, scatter, expected, to)


@functools.lru_cache(maxsize=_PLANS)
def plan_move(
    here: WorkerNumbers, source: ProcMesh, there: WorkerNumbers, target: ProcMesh, expected: TensorMetadata
) -> Move:
    """Which worker sends to which; ``here`` and ``there`` are the numbers of the workers of the two meshes.

    Raises:
        MeshMismatchError: ``target`` lacks an axis of ``source``, or has it in another size.
    """
    for axis, size in source.extent.items():
        if target.extent.get(axis) != size:
            raise MeshMismatchError(
                f"to_mesh keeps coordinates: {target!r} has no axis {axis!r} of size {size}, as {source!r} has. "
                "Slice the tensor's mesh first, or rename, split or flatten axes"
            )
    readers: dict[int, list[int]] = {here.by_rank[rank]: [] for rank in source.ranks}
    for rank, point in zip(target.ranks, target.extent.points(), strict=True):
        place = source.extent.rank_of({axis: point[axis] for axis in source.extent})
        sender, reader = here.by_rank[source.ranks[place]], there.by_rank[rank]
        if sender != reader:
            readers[sender].append(reader)
    groups = tuple((sender, *theirs) for sender, theirs in readers.items() if theirs)
    return Move(groups, expected)


@functools.lru_cache(maxsize=_PLANS)
def plan_restoration(
    numbers: WorkerNumbers, mesh: ProcMesh, axes: tuple[str, ...], expected: TensorMetadata
) -> tuple[Move, tuple[int, ...]]:
    """From which worker each new one gets its lost values, along ``axes``: from the one that has existed longest.

    Returns:
        The move; and the ranks of new workers that have no such worker.
    """
    groups, alone = [], []
    for ranks in ranks_along(mesh, axes):
        oldest = min(ranks, key=lambda rank: numbers.ages[rank])
        newer = [rank for rank in ranks if numbers.ages[rank]]
        if numbers.ages[oldest] and all(numbers.ages[rank] == max(numbers.ages) for rank in ranks):
            alone += newer
        elif others := [rank for rank in newer if rank != oldest]:
            groups.append(tuple(numbers.by_rank[rank] for rank in (oldest, *others)))
    return Move(tuple(groups), expected), tuple(alone)
