"""Who holds what: ranks of trainers (pipeline, expert, tensor parallelism, FSDP), and of engines (tensor and expert).

Shapes in, manifests and pieces out; there are no tensors. Both sides are cut by the store's own algebra of layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from skipper.benchmarks.weight_sync.modelled.moe import ModelTensor
from skipper.torchstore.algebra.layout import (
    Ints,
    Layout,
    Piece,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    contiguous_strides,
)
from skipper.torchstore.algebra.manifest import Manifest, MeshPosition, TensorItem

Dealt = dict[tuple[int, int | None], list[ModelTensor]]
"""Tensors by the stage of the pipeline, and the group of experts or None."""

__all__ = ["Dealt", "HeldPart", "ReaderMesh", "TrainerMesh", "manifest_of"]


@dataclass(frozen=True, slots=True)
class HeldPart:
    """What one rank holds of one tensor.

    Attributes:
        tensor: Which one.
        pieces: Boxes of it, as they are in the rank's own tensor; none: the rank's shard is empty.
        shape: Shape of the rank's own tensor.
    """

    tensor: ModelTensor
    pieces: tuple[Piece, ...]
    shape: Ints

    @staticmethod
    def of(tensor: ModelTensor, layout: Layout, coordinate: Ints) -> HeldPart:
        """What the rank at a coordinate holds."""
        return HeldPart(tensor, layout.pieces(coordinate), layout.local_shape(coordinate))

    @property
    def nbytes(self) -> int:
        """Bytes that the rank holds."""
        return prod(self.shape) * self.tensor.itemsize


@dataclass(frozen=True, slots=True)
class TrainerMesh:
    """Ranks that train: stages of a pipeline, of ``tensor * fsdp`` ranks each.

    What is not of an expert is cut by tensor parallelism and then by FSDP. Experts are dealt out to ``expert`` groups
    of the same ranks, and FSDP cuts each over the ranks of its group.

    Raises:
        ValueError: The ranks of a stage cannot be divided so.
    """

    stages: int
    tensor: int
    fsdp: int
    expert: int

    def __post_init__(self) -> None:
        if self.stage_size % self.expert:
            raise ValueError(f"{self.stage_size} ranks of a stage cannot make {self.expert} groups of experts")

    @property
    def stage_size(self) -> int:
        """Ranks of a stage."""
        return self.tensor * self.fsdp

    @property
    def size(self) -> int:
        """Ranks of all stages."""
        return self.stages * self.stage_size

    def describe(self) -> str:
        """In the field's letters, as ``PP8 TP2 FSDP16 EP16``."""
        return f"PP{self.stages} TP{self.tensor} FSDP{self.fsdp} EP{self.expert}"

    def deal(self, tensors: Iterable[ModelTensor], layers: int, experts: int) -> Dealt:
        """Which ranks have which tensors of a model with that many layers and experts."""
        dealt: Dealt = {}
        for tensor in tensors:
            stage = min(max(tensor.layer, 0), layers - 1) * self.stages // layers
            group = None if tensor.expert is None else tensor.expert * self.expert // experts
            dealt.setdefault((stage, group), []).append(tensor)
        return dealt

    def held(self, rank: int, dealt: Dealt) -> Iterator[HeldPart]:
        """What a rank holds of a model that has been dealt."""
        stage, place = divmod(rank, self.stage_size)
        for tensor in dealt.get((stage, None), ()):
            layout = Layout(tensor.shape, (self.fsdp, self.tensor), _fsdp_over(tensor.parallel_dim, self.tensor))
            yield HeldPart.of(tensor, layout, divmod(place, self.tensor))
        shards = self.stage_size // self.expert
        for tensor in dealt.get((stage, place // shards), ()):
            yield HeldPart.of(tensor, Layout(tensor.shape, (shards,), (Shard(0),)), (place % shards,))


@dataclass(frozen=True, slots=True)
class ReaderMesh:
    """Ranks that generate: ``engines`` of ``expert`` ranks each.

    An engine deals its experts out to all of its ranks, whole; what is not of an expert, ``tensor`` neighbours share by
    tensor parallelism, and each such group has all of it.

    Raises:
        ValueError: The ranks of an engine cannot be divided so.
    """

    engines: int
    expert: int
    tensor: int

    def __post_init__(self) -> None:
        if self.expert % self.tensor:
            raise ValueError(f"{self.expert} ranks of an engine cannot make groups of {self.tensor}")

    @property
    def size(self) -> int:
        """Ranks of all engines."""
        return self.engines * self.expert

    def describe(self) -> str:
        """In the field's letters, as ``4 x (TP8 EP32)``."""
        return f"{self.engines} x (TP{self.tensor} EP{self.expert})"

    def held(self, place: int, tensors: Iterable[ModelTensor], experts: int) -> Iterator[HeldPart]:
        """What the rank at ``place`` of every engine needs of a model with that many experts."""
        for tensor in tensors:
            if tensor.expert is None:
                cut: Placement = Replicate() if tensor.parallel_dim is None else Shard(tensor.parallel_dim)
                yield HeldPart.of(tensor, Layout(tensor.shape, (self.tensor,), (cut,)), (place % self.tensor,))
            elif tensor.expert * self.expert // experts == place:
                yield HeldPart.of(tensor, Layout(tensor.shape), ())


def manifest_of(rank: int, ranks: int, held: Iterator[HeldPart]) -> Manifest:
    """What a rank would publish of its tensors, each in memory of its own, as FSDP has them."""
    items: dict[str, TensorItem] = {}
    for number, part in enumerate(held):
        itemsize = part.tensor.itemsize
        strides = tuple(stride * itemsize for stride in contiguous_strides(part.shape))
        tensor = part.tensor
        items[tensor.name] = TensorItem(tensor.dtype, tensor.shape, part.pieces, number, 0, strides, itemsize)
    paths: Mapping[str, tuple[str, ...]] = {name: (name,) for name in items}
    return Manifest.of("state_dict", MeshPosition((rank,), (ranks,), (0,)), items, (), paths)


def _fsdp_over(parallel_dim: int | None, tensor: int) -> tuple[Placement, Placement]:
    """FSDP2 over tensor parallelism: the mesh names FSDP first, and the tensor was cut by the other axis first."""
    if parallel_dim is None:
        return Shard(0), Replicate()
    if parallel_dim == 0:
        return StridedShard(0, tensor), Shard(0)
    return Shard(0), Shard(parallel_dim)
