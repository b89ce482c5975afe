"""Descriptions of a store: of one version for readers, of all keys as a table for people."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import Literal

from skipper.control.runtime.status_providers import MAX_ROWS, Entry, Table
from skipper.torchstore.algebra.manifest import Manifest, Mode
from skipper.torchstore.controller.history import History
from skipper.torchstore.controller.index import Index
from skipper.torchstore.controller.version import Version
from skipper.torchstore.protocol.meta import TensorMeta, ValueMeta
from skipper.torchstore.tensors.values import open_inline


def describe_version(key: str, version: Version, versions: tuple[int, ...], item: str) -> ValueMeta:
    """Sum up the publishers' data about a version."""
    tensors: dict[str, TensorMeta] = {}
    objects: dict[str, None] = {}
    first, *_ = contributions = list(version.contributions.values())
    if first.inline:
        inline = open_inline(first.inline)
        if inline.dtype:
            tensors[""] = TensorMeta(inline.dtype, inline.shape)
        return ValueMeta(key, version.number, versions, _kind(tensors), "inline", tensors, (), 1)
    manifests = [contribution.manifest for contribution in contributions if contribution.manifest is not None]
    for manifest in manifests:
        tensors.update(_tensors(manifest, item))
        objects.update(dict.fromkeys(name for name in manifest.objects if not item or name == item))
    mode: Mode = next((binding.mode for _, binding in version.bindings()), "snapshot")
    whole = manifests[0].kind == "state_dict" and not item
    kind = "state_dict" if whole else _kind(tensors)
    volumes = tuple(
        tuple(holder.volume for holder in version.contributions[at].holders if holder.volume)
        for at in sorted(version.contributions)
    )
    return ValueMeta(key, version.number, versions, kind, mode, tensors, tuple(objects), len(contributions), volumes)


def _kind(tensors: Mapping[str, TensorMeta]) -> Literal["tensor", "object"]:
    return "tensor" if tensors else "object"


def _tensors(manifest: Manifest, item: str) -> Iterator[tuple[str, TensorMeta]]:
    for name, stored in manifest.tensors.items():
        if not stored.pickled and (not item or name == item):
            yield ("" if item else name), TensorMeta(stored.dtype, stored.global_shape)


_COLUMNS = ("key", "versions", "in the making", "retired, still read", "readers")
_WAIT_COLUMNS = ("process", "why", "seconds")
_MAX_LISTED = 8


def overview(store_name: str, index: Index) -> Table:
    """The present content of a store, the most recently changed keys first.

    From any thread: the controller continues at the same time, so rows may be from slightly different moments.
    """
    histories = index.histories()
    shown = heapq.nlargest(MAX_ROWS, histories, key=_changed)
    rows = [_row(history) for history in shown]
    return Table(f"Store {store_name}", _COLUMNS, rows, len(histories) - len(rows))


def waits(store_name: str, waiting: list[tuple[str, str, float]]) -> Table | None:
    """The requests that wait for an answer of a store (see `PendingAnswers.waiting`); None: there are none."""
    return Table(f"Store {store_name}: who waits", _WAIT_COLUMNS, waiting) if waiting else None


def _changed(history: History) -> int:
    return max((version.ready_as for version in list(history.ready.values())), default=0)


def _row(history: History) -> tuple[Entry, ...]:
    ready, staging, draining = sorted(history.ready.items()), list(history.staging), list(history.draining)
    numbers = [str(number) + _remark(version.closed, version.lost is not None) for number, version in ready]
    listed = ", ".join(numbers[-_MAX_LISTED:])
    if len(numbers) > _MAX_LISTED:
        listed = f"{len(numbers) - _MAX_LISTED} older, {listed}"
    readers = sum(len(version.leases) for version in [*(version for _, version in ready), *draining])
    making = ", ".join(map(str, sorted(staging)))
    return history.key, listed or None, making or None, len(draining), readers


def _remark(is_closed: bool, is_lost: bool) -> str:
    return " (lost)" if is_lost else " (taken back)" if is_closed else ""
