"""One version of one key: which ranks have contributed, and whether anything is missing. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import TypeVar

from torchstore.errors import StoreError
from torchstore.layout import Ints, uncovered
from torchstore.manifest import Binding, Manifest, Part
from torchstore.messages import Change, Publication
from torchstore.offers import Offers
from torchstore.process import ProcessId
from torchstore.recent import Recent


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one rank has put into one version.

    Attributes:
        arrived: When, by the controller's monotonic clock.
        stamp: As that of the publication, and so is the change.
    """

    writer: ProcessId
    part: Part
    manifest: Manifest | None
    binding: Binding | None
    generation: int = 0
    objects: bytes = b""
    inline: bytes = b""
    arrived: float = 0.0
    stamp: str = ""
    change: Change | None = None

    @staticmethod
    def of(publication: Publication, manifest: Manifest | None, binding: Binding | None, now: float) -> Contribution:
        """What a publication says, with the records in the place of their ids."""
        return Contribution(
            writer=publication.writer,
            part=manifest.part if manifest is not None else Part(),
            manifest=manifest,
            binding=binding,
            generation=publication.generation,
            objects=publication.objects,
            inline=publication.inline,
            arrived=now,
            stamp=publication.stamp,
            change=publication.change,
        )


@dataclass(slots=True)
class Version:
    """One version of one key.

    Attributes:
        contributions: By the rank's coordinate in the mesh; () for a publication that stands alone.
        leases: Who reads it now, by lease number.
        closed: Direct mode: taken back; nobody may start to read it.
        lost: Set when part of the bytes is gone: makes the error that readers get.
        offers: Copies of readers that other readers may read.
        ready_as: The how-manieth version of the store it was that became ready; 0 before.
    """

    number: int
    contributions: dict[Ints, Contribution] = field(default_factory=dict)
    leases: dict[int, ProcessId] = field(default_factory=dict)
    closed: bool = False
    lost: Callable[[], StoreError] | None = None
    ready_as: int = 0
    offers: Offers = field(default_factory=Offers)

    def bindings(self) -> Iterator[tuple[ProcessId, Binding]]:
        """The memory that this version uses, with the process that put it."""
        for contribution in self.contributions.values():
            if contribution.binding is not None:
                yield contribution.writer, contribution.binding

    def accepts(self, new: Contribution) -> bool:
        """Whether a contribution can belong to this version: same mesh, no conflict about a tensor."""
        for old in self.contributions.values():
            if old.part.mesh_shape != new.part.mesh_shape or (old.manifest is None) != (new.manifest is None):
                return False
            if old.manifest is not None and new.manifest is not None:
                return _remembered(_agreement, (old.manifest, new.manifest), _agree)
        return True

    def missing(self) -> tuple[str, ...]:
        """What is not there yet, one line each; empty when the version is complete."""
        contributions = list(self.contributions.values())
        part = contributions[0].part
        if not part.mesh_shape and contributions[0].manifest is None:
            return ()  # a small value, which came whole
        shards = {contribution.part.shard() for contribution in contributions}
        axes = [range(part.mesh_shape[axis]) for axis in part.sharded_axes]
        absent = [shard for shard in product(*axes) if shard not in shards]
        if absent:
            return tuple(f"the shard of rank {shard} along axes {part.sharded_axes}" for shard in absent)
        manifests = tuple(c.manifest for c in contributions if c.manifest is not None)
        return _remembered(_coverage, manifests, _holes)


A = TypeVar("A")

# Every step of a training run asks the same of the same manifests again. By their ids.
_agreement: Recent[frozenset[str], bool] = Recent(256)
_coverage: Recent[frozenset[str], tuple[str, ...]] = Recent(256)


def _remembered(
    answers: Recent[frozenset[str], A], manifests: tuple[Manifest, ...], ask: Callable[[tuple[Manifest, ...]], A]
) -> A:
    ids = frozenset(manifest.id for manifest in manifests)
    known = answers.get(ids)
    return known if known is not None else answers.put(ids, ask(manifests))


def _agree(manifests: tuple[Manifest, ...]) -> bool:
    """Whether the first two manifests can be of one version: no tensor is said to be two things."""
    left, right = manifests[0], manifests[-1]
    return left.kind == right.kind and all(
        (left.tensors[name].dtype, left.tensors[name].global_shape)
        == (right.tensors[name].dtype, right.tensors[name].global_shape)
        for name in left.tensors.keys() & right.tensors.keys()
    )


def _holes(manifests: tuple[Manifest, ...]) -> tuple[str, ...]:
    """The boxes that these manifests leave open: none is the proof that the version is whole."""
    lines: list[str] = []
    for name in dict.fromkeys(name for manifest in manifests for name in manifest.tensors):
        holders = [manifest for manifest in manifests if name in manifest.tensors]
        shape = holders[0].tensors[name].global_shape
        boxes = frozenset(box for manifest in holders for box in manifest.boxes(name))
        lines.extend(
            f"{name or 'the tensor'}[offsets {box.offsets}, shape {box.shape}]" for box in uncovered(shape, boxes)
        )
    return tuple(lines)


def lives_in(version: Version, process: ProcessId) -> bool:
    """Whether bytes of the version lie in this process' own memory (direct mode)."""
    return any(writer == process and binding.mode == "direct" for writer, binding in version.bindings())
