"""The sources of the elements of tensors, while a model loads tensors without values.

Views need no bookkeeping: the storage, offset, shape and strides of a view define its elements. So only the writes to
each storage are recorded.
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
    """One value, known at recording."""

    value: float


@dataclass(frozen=True, slots=True)
class Computed:
    """A value that a plan cannot express, computed from these checkpoint tensors."""

    names: frozenset[str]
    reason: str


Source = FromCheckpoint | Constant | Computed


@dataclass(frozen=True, slots=True)
class Written:
    """Addresses of a storage (or of a tensor that they represent), and what was written there."""

    into: Strided
    source: Source


class Contents:
    """The content of storages. It keeps every followed tensor alive, so that no other storage gets its id."""

    def __init__(self) -> None:
        self._written: dict[int, list[Written]] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._kept: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor, *written: Written) -> None:
        """Follow a storage from now on; ``tensor`` is all of it, or a part of it, in the storage's dtype."""
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
        """The content of a tensor, newest first; elements that were never written are left out.

        Args:
            tensor: A tensor of any strides, over a followed storage.
            along: Addresses of the tensor's shape, to return in place of its own.
        """
        place, here = storage_id(tensor), addresses(tensor)
        try:
            if tensor.dtype != self._dtypes[place] or not is_direct(tensor):
                raise NotStridedError("seen in another dtype, conjugated or negated")
            # Merged: contiguous rows are compared with rows of any other length.
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
        """The checkpoint tensors from which some elements of these tensors come."""
        return frozenset().union(*(names_of(self.read(tensor)) for tensor in tensors if self.is_known(tensor)))

    def escaped(self, own: Iterable[torch.Tensor]) -> frozenset[str]:
        """The checkpoint tensors whose elements are kept in other tensors than these; must be the last call.

        Args:
            own: Tensors whose storages are ignored.
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
        """Write the content of one tensor into another one of its shape; converts like torch's ``copy_``.

        Args:
            into: The destination; its storage is followed from now on.
            source: Any tensor.
            untold: The content of ``source`` if its storage is not followed; None: unknown.
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
        """Record a write to a tensor that a plan cannot express."""
        at = addresses(tensor) if self.is_known(tensor) and self._is_plain(tensor) else _all_of(tensor)
        self.add(tensor, Written(at, Computed(names, reason)))

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        repeated = any(not stride and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.dtype == self._dtypes[storage_id(tensor)] and is_direct(tensor) and not repeated


def storage_id(tensor: torch.Tensor) -> int:
    """An id that is equal for all views of one storage; meta tensors have no address, but a storage."""
    found: int = _weakly(tensor).cdata
    return found


def _weakly(tensor: torch.Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def addresses(tensor: torch.Tensor) -> Strided:
    """A tensor's elements within its storage."""
    return Strided(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def names_of(written: Iterable[Written]) -> frozenset[str]:
    """The checkpoint tensors in a content."""
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
