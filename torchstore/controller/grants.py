"""Leases on versions, for readers: what is granted, and the data that a reader gets with it. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from skipper.torchstore.controller.history import History
from skipper.torchstore.controller.index import Index
from skipper.torchstore.controller.peer_read_scheduler import Patience
from skipper.torchstore.controller.version import Contribution, Version
from skipper.torchstore.errors import KeyNotFoundError
from skipper.torchstore.protocol.messages import Grant, Share, Shares, Wanted
from skipper.torchstore.support.lru_cache import LRUCache
from skipper.torchstore.support.process import ProcessId


def grant_all(
    index: Index, wanted: tuple[Wanted, ...], reader: ProcessId, waited_s: float, patience: Patience | None = None
) -> tuple[Grant, ...] | None:
    """Leases on all requested versions; None while one of them must be awaited.

    Raises:
        KeyNotFoundError: A key does not exist and none is being published.
        StoreError: Its bytes are lost.
    """
    found = [(request, where) for request in wanted if (where := index.find(request)) is not None]
    if len(found) < len(wanted):
        return None
    if patience is not None:
        for request, (_, version, _) in found:
            if (
                request.read_group
                and version.peer_reads.must_wait(request.read_group, reader)
                and not patience.is_over()
            ):
                return None
    entries = [index.overwritten(request, *where) for request, where in found]
    for (_, where), names in zip(found, entries, strict=True):
        _check_entries(*where, names)
    singles: list[list[tuple[Wanted, tuple[History, Version, str]]]] = []
    for (_, (history, _, _)), names in zip(found, entries, strict=True):
        singles.append([])
        for name in names:
            single = Wanted(f"{history.key}/{name}")
            at = index.find(single)
            if at is None:
                return None
            singles[-1].append((single, at))
    # From here on nothing is refused: a lease that no reader learns of would never be given back.
    grants = []
    for (request, where), names, group in zip(found, entries, singles, strict=True):
        beside = tuple([_grant(single, reader, waited_s, *at) for single, at in group])
        grants.append(_grant(request, reader, waited_s, *where, names, beside))
    return tuple(grants)


def _check_entries(history: History, version: Version, item: str, overwritten: tuple[str, ...]) -> None:
    """Refuse the whole newest state dict if an entry of it has been deleted.

    Raises:
        KeyNotFoundError: One has been deleted.
    """
    if item or not history.hidden or version is not history.newest:
        return
    absent = history.hidden.difference(overwritten)
    if absent and not next(iter(version.contributions.values())).inline:
        raise KeyNotFoundError(f"{history.key}/{min(absent)}")


def _grant(
    wanted: Wanted,
    reader: ProcessId,
    waited_s: float,
    history: History,
    version: Version,
    item: str,
    overwritten: tuple[str, ...] = (),
    singles: tuple[Grant, ...] = (),
) -> Grant:
    """Lease a version to a reader, with the data that it needs for reading."""
    # In rank order, not in order of arrival: then equal sources are equal for the reader's plans.
    first, *_ = contributions = [version.contributions[at] for at in sorted(version.contributions)]
    if first.inline:
        return Grant(history.key, version.number, inline=first.inline)
    known = frozenset(wanted.known)
    shares = _told(contributions, known)
    lease, peer_copy = history.lease(version, reader), None
    if wanted.read_group:
        history.withdraw(reader)  # its earlier copy will be overwritten
        peer_copy = version.peer_reads.choose(wanted.read_group, reader)
        version.peer_reads.begin(wanted.read_group, lease, reader, peer_copy)
    came = [(contribution.arrived, contribution.part.coordinate) for contribution in contributions]
    last_came, slowest_rank = max(came)
    return Grant(
        history.key,
        version.number,
        lease,
        shares,
        item=item,
        waited_s=waited_s,
        slowest_rank=slowest_rank,
        spread_s=last_came - min(came)[0],
        peer_copy=_brief_share(peer_copy.share, known) if peer_copy is not None else None,
        overwritten=overwritten,
        singles=singles,
    )


def _told(contributions: list[Contribution], known: frozenset[str]) -> tuple[Share, ...]:
    """The shares for a reader; for a version of many publishers, readers that know the records get the same objects.

    For 512 readers of 2,048 publishers there are a million: making and pickling them for each reader would take
    seconds.
    """
    if len(contributions) < _MANY:
        return tuple(_shares(contributions, known))
    ids = tuple(map(id, contributions))
    found = _briefs.get(ids)
    if found is None:
        records = (record for each in contributions for record in (each.manifest, *each.holders))
        every = frozenset(record.id for record in records if record is not None)
        found = _briefs.put(ids, _Brief(contributions, every, Shares(_shares(contributions, every))))
    return found.shares if found.ids <= known else tuple(_shares(contributions, known))


_MANY = 16  # publishers: making fewer shares is faster than looking them up


@dataclass(frozen=True, slots=True)
class _Brief:
    """The shares of a version as ids, for readers that know all of its records.

    Attributes:
        contributions: Their contributions, kept alive so that no others get their ids.
        ids: Of the records.
    """

    contributions: list[Contribution]
    ids: frozenset[str]
    shares: Shares


_briefs: LRUCache[tuple[int, ...], _Brief] = LRUCache(8)


def _shares(contributions: list[Contribution], known: frozenset[str]) -> Iterator[Share]:
    """The shares, with ids in place of records that the reader knows, and equal objects only once."""
    told: set[str] = set()
    for contribution in contributions:
        if contribution.manifest is None:
            continue
        news = not told.issuperset(contribution.manifest.objects)
        told.update(contribution.manifest.objects)
        yield Share(
            _brief(contribution.manifest, known),
            _brief(contribution.binding, known),
            contribution.generation,
            contribution.writer,
            contribution.objects if news else b"",
            contribution.stamp,
            contribution.change,
            tuple([_brief(copy, known) for copy in contribution.copies]),
        )


def _brief_share(share: Share, known: frozenset[str]) -> Share:
    copies = tuple([_brief(copy, known) for copy in share.copies])
    return replace(share, manifest=_brief(share.manifest, known), binding=_brief(share.binding, known), copies=copies)


def _brief(record: Any, known: frozenset[str]) -> Any:
    return record.id if record is not None and record.id in known else record
