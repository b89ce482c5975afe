"""One version of one key: which ranks have contributed, and whether anything is missing. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from skipper.torchstore.algebra.layout import Box, Ints, uncovered
from skipper.torchstore.algebra.manifest import WHOLE, Binding, Digests, Manifest, MeshPosition, TensorItem
from skipper.torchstore.controller.agreement import Agreement
from skipper.torchstore.controller.peer_read_scheduler import PeerReadScheduler
from skipper.torchstore.controller.steps import Step, name_ranks
from skipper.torchstore.errors import (
    NotCertifiedError,
    PartiallyPublishedError,
    ReplicaMismatchError,
    ShareDTypeMismatchError,
    ShareLayoutMismatchError,
    ShareMismatchError,
    StoreError,
)
from skipper.torchstore.protocol.messages import Change, Publication
from skipper.torchstore.protocol.origin import ALONE, Turn
from skipper.torchstore.support.lru_cache import LRUCache
from skipper.torchstore.support.process import ProcessId
from skipper.torchstore.tensors.tiles import TensorsTiles


@dataclass(slots=True, eq=False)  # not frozen: one is made for each small put, and freezing would double the time
class Contribution:
    """One rank's contribution to one version; never changed.

    Attributes:
        arrived: When, by the controller's monotonic clock.
        stamp: Like that of the publication, and so is the change.
        copies: The same bytes in other volumes.
        tiles: Those of the publication.
    """

    writer: ProcessId
    part: MeshPosition
    manifest: Manifest | None
    binding: Binding | None
    generation: int = 0
    objects: bytes = b""
    inline: bytes = b""
    arrived: float = 0.0
    stamp: str = ""
    change: Change | None = None
    turn: Turn = ALONE
    digests: Digests = field(default_factory=dict)
    copies: tuple[Binding, ...] = ()
    tiles: TensorsTiles | None = None

    @property
    def rank(self) -> int:
        """The rank of the writer in its group."""
        return self.turn.origin.rank

    @staticmethod
    def of(
        publication: Publication,
        manifest: Manifest | None,
        binding: Binding | None,
        now: float,
        copies: tuple[Binding, ...] = (),
    ) -> Contribution:
        """The contribution of a publication, with its ids replaced by the records."""
        return Contribution(
            writer=publication.writer,
            part=manifest.part if manifest is not None else WHOLE,
            manifest=manifest,
            binding=binding,
            generation=publication.generation,
            objects=publication.objects,
            inline=publication.inline,
            arrived=now,
            stamp=publication.stamp,
            change=publication.change,
            turn=publication.turn,
            digests=publication.digests,
            copies=copies,
            tiles=publication.tiles,
        )

    @property
    def holders(self) -> tuple[Binding, ...]:
        """All memory that contains its bytes; each is enough."""
        return (self.binding, *self.copies) if self.binding is not None else ()


@dataclass(slots=True)
class Version:
    """One version of one key.

    Attributes:
        contributions: By rank in the publishing group.
        step: The step of that group; None for a process that publishes alone.
        is_familiar: All contributions have the layout of a version that is known to fit together.
        leases: Its present readers, by lease number.
        closed: Direct mode: withdrawn; no reader may start to read it.
        lost: Set when some bytes are gone: makes the error that readers get.
        offers: Copies of readers that other readers may read.
        is_disputed: Shares contradict each other about a tensor.
        ready_as: Its number among the ready versions of the store; 0 before.
    """

    number: int
    key: str = ""
    contributions: dict[int, Contribution] = field(default_factory=dict)
    step: Step | None = None
    is_familiar: bool = True
    leases: dict[int, ProcessId] = field(default_factory=dict)
    closed: bool = False
    lost: Callable[[], StoreError] | None = None
    ready_as: int = 0
    peer_reads: PeerReadScheduler = field(default_factory=PeerReadScheduler)
    is_disputed: bool = False

    def bindings(self) -> Iterator[tuple[ProcessId, Binding]]:
        """The memory that this version uses, with the process that wrote it."""
        for contribution in self.contributions.values():
            for binding in contribution.holders:
                yield contribution.writer, binding

    @property
    def is_plain(self) -> bool:
        """Whether it is a single value, and not a state dict."""
        return any(c.manifest is None or c.manifest.kind == "value" for c in self.contributions.values())

    def tiles(self) -> dict[int, TensorsTiles]:
        """Its publishers' certificates for its tiles, by their ranks.

        Raises:
            NotCertifiedError: A publisher with tensors has sent none.
        """
        silent = [
            rank
            for rank, share in self.contributions.items()
            if share.tiles is None and (share.manifest is None or share.manifest.tensors)
        ]
        if silent:
            size = self.step.size if self.step is not None else 1
            by = f" by {name_ranks(tuple(sorted(silent)), size)}" if size > 1 else ""
            raise NotCertifiedError(self.key, self.number, f"it was put without certify=True{by}")
        return {rank: share.tiles for rank, share in self.contributions.items() if share.tiles is not None}

    def leave(self, volume: str) -> bool:
        """Drop the copies in a lost volume. Returns whether some part has no copy any more."""
        for at, contribution in self.contributions.items():
            left = tuple(holder for holder in contribution.holders if holder.volume != volume)
            if len(left) == len(contribution.holders):
                continue
            if not left:
                return True
            self.contributions[at] = replace(contribution, binding=left[0], copies=left[1:])
        return False

    def conflict(self, new: Contribution) -> StoreError | None:
        """Why a contribution cannot belong to this version; None: it can.

        `is_familiar` says whether that contribution has the same layout as the others.
        """
        for rank, old in self.contributions.items() if not (self.is_familiar or self._agrees(new)) else ():
            if rank == new.rank or old.manifest is None or new.manifest is None or old.manifest.id == new.manifest.id:
                continue
            is_replica = self.step is not None and self.step.alone and _is_filled(old) and _is_filled(new)
            check = (_replicates, _disagree_as_replicas) if is_replica else (_agreement, _disagree)
            if _remembered(check[0], (old.manifest, new.manifest), check[1]):
                if disagreement(self.key, {rank: old.manifest, new.rank: new.manifest}, new.rank, more=False) is None:
                    problem = check[1]((old.manifest, new.manifest))  # reported in this order
                    return ShareMismatchError(
                        self.key, f"the share of rank {new.rank} does not fit that of rank {rank}: {problem}"
                    )
                self.is_disputed = True
        if self.is_disputed:
            odd = self._odd(new)
            if odd is not None:
                return odd
        for rank, old in self.contributions.items() if new.digests else ():
            for name, *box in old.digests.keys() & new.digests.keys() if rank != new.rank else ():
                at = (name, box[0], box[1])
                if old.digests[at] != new.digests[at]:
                    return ReplicaMismatchError(self.key, name, (box[0], box[1]), (rank, new.rank))
        return None

    def _agrees(self, new: Contribution) -> bool:
        """Whether a share agrees with all others; if not, they must be compared one by one."""
        if self.is_disputed or (self.step is not None and self.step.alone):
            return False
        shares = (*self.contributions.values(), new)
        manifests = [share.manifest for share in shares if share.manifest is not None]
        agreement = _agreements.get((self.key, self.number))
        if agreement is None or not agreement.is_about(manifests):
            agreement = _agreements.put((self.key, self.number), Agreement())
        return all(agreement.take(manifest) for manifest in manifests)

    def _odd(self, new: Contribution) -> ShareMismatchError | None:
        """The error that names the rank that differs; None while later shares must show which one does."""
        shares = {**self.contributions, new.rank: new}
        manifests = {rank: share.manifest for rank, share in shares.items() if share.manifest is not None}
        more = self.step is not None and not set(self.step.absent()) <= {new.rank}
        return disagreement(self.key, manifests, new.rank, more=more)

    def missing(self) -> tuple[str, ...]:
        """What is still missing, one line each; empty if the version is complete."""
        absent = self.step.absent() if self.step is not None else ()
        if absent:
            return (f"the share of {name_ranks(absent, self.step.size)}",) if self.step is not None else ()
        return _missing_of(self.contributions.values())

    def incomplete(self) -> PartiallyPublishedError:
        """The error for reads before it is complete."""
        waits = self.step is not None and self.step.absent()
        return PartiallyPublishedError(self.key, self.number, self.missing(), _HINT if waits else "")

    def without(self, process: ProcessId) -> dict[int, Contribution] | None:
        """The contributions of others, if they contain the whole version; else None."""
        others = {rank: old for rank, old in self.contributions.items() if old.writer != process}
        names, rest = (
            {name for c in some if c.manifest is not None for name in (*c.manifest.tensors, *c.manifest.objects)}
            for some in (self.contributions.values(), others.values())
        )
        return others if others and names == rest and not _missing_of(others.values()) else None


def _missing_of(contributions: Collection[Contribution]) -> tuple[str, ...]:
    manifests = tuple(c.manifest for c in contributions if c.manifest is not None)
    return _remembered(_coverage, manifests, _holes) if manifests else ()


def _is_filled(contribution: Contribution) -> bool:
    manifest = contribution.manifest
    return manifest is None or bool(manifest.tensors or manifest.objects)


_HINT = (
    "every rank of the process group puts each step, those that have nothing to give an empty state dict; if only "
    "some ranks put, they pass publisher=(index, count)"
)

A = TypeVar("A")

# Every step of a training run compares the same manifests again: the results are cached by their ids.
_agreements: LRUCache[tuple[str, int], Agreement] = LRUCache(8)
_agreement: LRUCache[frozenset[str], str] = LRUCache(4096)
_replicates: LRUCache[frozenset[str], str] = LRUCache(256)
_coverage: LRUCache[frozenset[str], tuple[str, ...]] = LRUCache(256)


def _remembered(
    answers: LRUCache[frozenset[str], A], manifests: tuple[Manifest, ...], ask: Callable[[tuple[Manifest, ...]], A]
) -> A:
    ids = frozenset(manifest.id for manifest in manifests)
    known = answers.get(ids)
    return known if known is not None else answers.put(ids, ask(manifests))


def _disagree(manifests: tuple[Manifest, ...]) -> str:
    """How two manifests of one version contradict each other about a tensor; "" if they do not."""
    left, right = manifests
    if left.kind != right.kind:
        return f"it is a {right.kind} and not a {left.kind}"
    for name in left.tensors.keys() & right.tensors.keys():
        old, new = left.tensors[name], right.tensors[name]
        if (old.dtype, old.global_shape) != (new.dtype, new.global_shape):
            said = (f"{item.dtype.removeprefix('torch.')}{list(item.global_shape)}" for item in (new, old))
            return f"{name or 'the tensor'} is {' and not '.join(said)}"
    return ""


def _disagree_as_replicas(manifests: tuple[Manifest, ...]) -> str:
    """The same for two that each contain the whole value."""
    names = [{*manifest.tensors, *manifest.objects} for manifest in manifests]
    differing = sorted(names[0] ^ names[1])
    if differing:
        return (
            f"they have put different names, {differing[0]!r} for one, and neither has DTensors; ranks that put parts "
            "of one version pass publisher=(rank, ranks)"
        )
    return _disagree(manifests)


def _holes(manifests: tuple[Manifest, ...]) -> tuple[str, ...]:
    """The boxes that these manifests do not cover: none proves that the version is complete."""
    holders: dict[str, list[TensorItem]] = {}
    for manifest in manifests:
        for name, item in manifest.tensors.items():
            holders.setdefault(name, []).append(item)
    lines: list[str] = []
    known: dict[tuple[Any, ...], tuple[Box, ...]] = {}  # by shape and pieces, which tensors with one layout share
    for name, items in holders.items():
        shape = items[0].global_shape
        alike = (shape, *[id(item.pieces) for item in items])
        holes = known.get(alike)
        if holes is None:
            boxes = frozenset(piece.box for item in items for piece in item.pieces)
            holes = known[alike] = uncovered(shape, boxes)
        lines.extend(f"{name or 'the tensor'}[offsets {box.offsets}, shape {box.shape}]" for box in holes)
    return tuple(lines)


def lives_in(version: Version, process: ProcessId) -> bool:
    """Whether bytes of the version are in this process' own memory (direct mode)."""
    return any(writer == process and binding.mode == "direct" for writer, binding in version.bindings())


_SHOWN = 8

_UNEVEN = (
    "; for uneven shards give DTensor.from_local the whole shape= and stride=, since it takes the local shape times "
    "the number of ranks for the whole"
)


def disagreement(key: str, shares: Mapping[int, Manifest], newest: int, *, more: bool) -> ShareMismatchError | None:
    """The error that names the differing ranks for the first tensor that ranks disagree about.

    Returns:
        None if they agree about all tensors, or if the next share must decide.
    """
    for name in dict.fromkeys(name for manifest in shares.values() for name in manifest.tensors):
        said: dict[tuple[str, Ints], list[int]] = {}
        for rank, manifest in sorted(shares.items()):
            item = manifest.tensors.get(name)
            if item is not None:
                said.setdefault((item.dtype, item.global_shape), []).append(rank)
        if len(said) < 2:
            continue
        groups = sorted(said.items(), key=lambda group: (-len(group[1]), newest in group[1]))
        (wanted, many), *others = groups
        undecided = len(many) == len(others[0][1])
        if undecided and more:
            return None
        odd, few = next((group for group in others if newest in group[1]), others[-1])
        sharded = any(_is_part(shares[rank].tensors[name]) for rank in (*many, *few))
        dtypes = odd[0] != wanted[0]
        kind = ShareDTypeMismatchError if dtypes else ShareLayoutMismatchError
        advice = _UNEVEN if sharded and not dtypes else ""
        return kind(
            f"{key}/{name}" if name else key,
            f"{_ranks(few)} put {_described(odd)} and not {_described(wanted)} as {_ranks(many)} did{advice}",
            tuple(few),
            tuple(many),
        )
    return None


def _is_part(item: TensorItem) -> bool:
    return any(piece.box.shape != item.global_shape for piece in item.pieces)


def _described(said: tuple[str, Ints]) -> str:
    return f"{said[0].removeprefix('torch.')}{list(said[1])}"


def _ranks(ranks: list[int]) -> str:
    shown = [str(rank) for rank in ranks[:_SHOWN]]
    if len(ranks) > _SHOWN:
        shown.append(f"{len(ranks) - _SHOWN} more")
    return f"rank {shown[0]}" if len(shown) == 1 else f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
