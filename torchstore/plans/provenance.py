"""Where the elements of tensors come from, while a model loads tensors without values.

Views need no bookkeeping: a view says by its storage, offset, shape and strides which elements it means. So what is
kept is, for each storage, what was written to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from skipper.torchstore.algebra.strided import NotStridedError, Pair, Strided, meet, merged
from skipper.torchstore.tensors.local_tensors import is_direct


@dataclass(frozen=True, slots=True)
class FromCheckpoint:
    """The elements of a checkpoint tensor, at these addresses, cast to these dtypes one after another."""

    name: str
    at: Strided
    casts: tuple[torch.dtype, ...] = ()


@dataclass(frozen=True, slots=True)
class Constant:
    """One value, known now."""

    value: float


@dataclass(frozen=True, slots=True)
class Computed:
    """What a plan has no words for, made of these checkpoint tensors."""

    names: frozenset[str]
    reason: str


Source = FromCheckpoint | Constant | Computed


@dataclass(frozen=True, slots=True)
class Written:
    """Addresses of a storage (or of another tensor that they stand for), and what was written there."""

    into: Strided
    source: Source


class Contents:
    """What storages hold. It keeps every tensor that it has been told of, so that no storage takes another's place."""

    def __init__(self) -> None:
        self._written: dict[int, list[Written]] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._kept: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor, *written: Written) -> None:
        """Follow a storage from now on; ``tensor`` is all of it, or part of it in the dtype that it has."""
        place = storage_id(tensor)
        if place not in self._written:
            self._written[place] = []
            self._dtypes[place] = tensor.dtype
            self._kept.append(tensor)
        self._written[place] += written

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether its storage is followed."""
        return storage_id(tensor) in self._written

    def read(self, tensor: torch.Tensor, along: Strided | None = None) -> list[Written]:
        """What a tensor holds, newest first; elements that nobody wrote are left out.

        Args:
            tensor: Of any strides, over a storage that is followed.
            along: Addresses of the tensor's shape that are to be told in place of its own.
        """
        place, here = storage_id(tensor), addresses(tensor)
        try:
            if tensor.dtype != self._dtypes[place] or not is_direct(tensor):
                raise NotStridedError("seen in another dtype, conjugated or negated")
            # Merged: rows that lie one after another meet rows of any other length.
            rest, found = [merged(Pair(here, along or here))], []
            for written in reversed(self._written[place]):
                source = written.source
                region = merged(Pair(written.into, source.at if isinstance(source, FromCheckpoint) else written.into))
                cuts = [meet(view, region) for view in rest]
                for pair in (pair for cut in cuts for pair in cut.found):
                    cut_source = replace(source, at=pair.of) if isinstance(source, FromCheckpoint) else source
                    found.append(Written(pair.at, cut_source))
                rest = [view for cut in cuts for view in cut.rest]
        except NotStridedError as error:
            names = names_of(self._written[place])
            return [Written(along or here, Computed(names, str(error)))] if names else []
        return found

    def names(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        """The checkpoint tensors that some elements of these come from."""
        return frozenset().union(*(names_of(self.read(tensor)) for tensor in tensors if self.is_known(tensor)))

    def escaped(self, own: Iterable[torch.Tensor]) -> frozenset[str]:
        """The checkpoint tensors of which something is kept by somebody else, beside these; the last call of all.

        Args:
            own: Tensors whose storages do not count.
        """
        storages = {storage_id(tensor) for tensor in own}
        held = [
            (names_of(self._written[storage_id(tensor)]), _weakly(tensor))
            for tensor in self._kept
            if storage_id(tensor) not in storages
        ]
        self._kept.clear()
        return frozenset().union(*(names for names, storage in held if not storage.expired()))

    def copy(self, into: torch.Tensor, source: torch.Tensor, *, untold: Source | None) -> None:
        """Write what one tensor holds into another one of its shape; converts as torch's ``copy_`` does.

        Args:
            into: Its storage is followed from now on.
            source: Any tensor.
            untold: What ``source`` holds if its storage is not followed; None: nothing that can be told.
        """
        target, source = addresses(into), source.expand(into.shape)
        self.add(into)
        if not self._is_plain(into):
            self.spoil(into, self.names((into, source)), "written in another dtype, or to an expanded tensor")
        elif self.is_known(source):
            parts = self.read(source, target)
            if into.dtype != source.dtype:
                parts = [Written(part.into, _cast(part.source, into.dtype)) for part in parts]
            self.add(into, *reversed(parts))
        elif untold is not None:
            self.add(into, Written(target, untold))

    def spoil(self, tensor: torch.Tensor, names: frozenset[str], reason: str) -> None:
        """A tensor was written to in a way that a plan has no words for."""
        at = addresses(tensor) if self.is_known(tensor) and self._is_plain(tensor) else _all_of(tensor)
        self.add(tensor, Written(at, Computed(names, reason)))

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        repeated = any(not stride and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.dtype == self._dtypes[storage_id(tensor)] and is_direct(tensor) and not repeated


def storage_id(tensor: torch.Tensor) -> int:
    """The same for all views of one storage; meta tensors have no address, but they have a storage."""
    found: int = _weakly(tensor).cdata
    return found


def _weakly(tensor: torch.Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def addresses(tensor: torch.Tensor) -> Strided:
    """A tensor's elements within its storage."""
    return Strided(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def names_of(written: Iterable[Written]) -> frozenset[str]:
    """The checkpoint tensors that are named there."""
    return frozenset(name for part in written for name in _names(part.source))


def _names(source: Source) -> Iterator[str]:
    match source:
        case FromCheckpoint(name=name):
            yield name
        case Computed(names=names):
            yield from names


def _cast(source: Source, dtype: torch.dtype) -> Source:
    return replace(source, casts=(*source.casts, dtype)) if isinstance(source, FromCheckpoint) else source


def _all_of(tensor: torch.Tensor) -> Strided:
    return Strided(0, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,))
