"""The life of the versions of one key: staging → ready → (closed) → retired. No I/O, no clock, no actor.

A version is assembled from the shares of one step of a publishing group (`torchstore.controller.steps`). It becomes
ready, all at once, when the step is complete and the boxes cover every tensor. From then on it never changes. Readers
hold leases; a replaced version is retired when its last lease is given back, and only then may its memory be reused.

In direct mode the memory belongs to the publisher, which will change it: `close` keeps new readers out, and
`is_drained` says when the last reader has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from skipper.torchstore.algebra.manifest import Binding, Manifest
from skipper.torchstore.controller.steps import Step, Steps
from skipper.torchstore.controller.version import Contribution, Version, lives_in
from skipper.torchstore.errors import (
    KeyNotFoundError,
    NotCertifiedError,
    PublisherLostError,
    SourceChangedError,
    StoreError,
    VersionExistsError,
    VersionNotFoundError,
    VolumeLostError,
)
from skipper.torchstore.protocol.messages import NEWEST, Selector, Share
from skipper.torchstore.support.process import ProcessId
from skipper.torchstore.support.serial import Serial
from skipper.torchstore.tensors.tiles import TensorsTiles

CERTIFICATES_KEPT = 4
"""How many certificates each key keeps, whatever versions it keeps."""


class Numbers:
    """Counters that the histories of one store share.

    Attributes:
        leases: How many leases were given.
        ready: How many versions became ready.
    """

    __slots__ = ("leases", "ready")

    def __init__(self) -> None:
        self.leases = Serial()
        self.ready = Serial()


class History:
    """All versions of one key.

    ``keep`` ready versions stay readable, besides those that are being read.
    """

    def __init__(self, key: str, *, keep: int = 1, numbers: Numbers | None = None) -> None:
        self.key = key
        self._numbers = numbers or Numbers()
        self.keep = keep
        self.staging: dict[int, Version] = {}
        self.ready: dict[int, Version] = {}
        self.draining: list[Version] = []
        self.hidden: set[str] = set()
        # All memory that versions have used: their writers keep it for the next version.
        self.memory: dict[str, tuple[ProcessId, Binding]] = {}
        self.spoilt: set[str] = set()
        """Memory whose reader was lost: a stopped reader might continue, so nothing else is written there."""
        self.steps = Steps(key)
        self._fitting: dict[tuple[int, int], str] = {}  # the manifests of the latest version of several ranks
        self._newest = 0
        self._certified: dict[int, dict[int, TensorsTiles]] = {}
        self._reserved = 0  # the latest reserved number

    # Publishing -----------------------------------------------------------------------------------------

    def reserve(self) -> int:
        """The number of a new version, which no other put gets.

        Publishers that agree on a number have finished the previous one: its missing shares will not come.
        """
        if self._reserved in self.staging:
            self._abandon(self.staging[self._reserved], "another version was started")
        self._newest += 1
        self._reserved = self._newest
        return self._newest

    def contribute(self, new: Contribution, number: int | None) -> Version:
        """Add one rank's share to a version; the version becomes ready if nothing is missing any more.

        Without a ``number``, it is the version of the share's step.

        Returns:
            The version; for a replica of a version that is gone, an empty version with its number.

        Raises:
            VersionExistsError: The number belongs to a ready version, or is older than one.
            LateShareError: The step was given up.
            OutOfStepError: The rank is too far ahead of others.
            ShareMismatchError: The shares of the step do not fit together; the step is given up.
            ReplicaMismatchError: Replicas differ; the step is given up.
        """
        for binding in new.holders:
            self.memory[binding.id] = (new.writer, binding)
        version = self._version_of(new, number)
        rank, step = new.rank, version.step
        if step is not None:
            if not step.is_open:
                return self._join(version, step, new)
            self._check(version, step, new)
            replaced = version.contributions.get(rank)
            if replaced is not None:
                self.draining.append(Version(version.number, contributions={rank: replaced}))
            step.add(new.turn)
        version.contributions[rank] = new
        if new.binding is not None and new.binding.mode == "direct":
            self._supersede(new.binding, version)
        if (step is None or step.is_complete) and not version.missing():
            self._make_ready(version)
        return version

    def check_number(self, number: int | None) -> None:
        """Check that a version can have this number; None is the next one.

        Raises:
            VersionExistsError: It belongs to a ready version, or is older than one.
        """
        if number is not None and number <= max(self.ready, default=number - 1):
            raise VersionExistsError(self.key, number, max(self.ready))

    def _version_of(self, new: Contribution, number: int | None) -> Version:
        """The version that a share belongs to."""
        if new.turn.origin.size == 1:
            if number is None:
                return self._begin(self._newest + 1, None)
            self.check_number(number)
            return self._begin(number, None)
        known = self.steps.find(new.turn, number) if number is not None else None
        if known is None:
            self.check_number(number)
        step = self.steps.place(new.turn, new.writer, number, self._newest)
        for staged in [version for version in self.staging.values() if version.step and version.step.given_up]:
            self._abandon(staged, "")
        version = (self.staging if step.is_open else self.ready).get(step.version)
        if version is not None and version.step is step:
            return version
        return self._begin(step.version, step) if step.is_open else Version(step.version, self.key, step=step)

    def _begin(self, number: int, step: Step | None) -> Version:
        staged = self.staging.get(number)
        if staged is not None:
            self._abandon(staged, f"version {number} has been put by other ranks in the meantime")
        self._newest = max(self._newest, number)
        version = self.staging[number] = Version(number, self.key, step=step)
        return version

    def _join(self, version: Version, step: Step, new: Contribution) -> Version:
        """Add a share to a complete step: a repeated one, or a late replica."""
        at = step.puts.get(new.rank)
        if at is not None and at != (new.turn.session, new.turn.number):
            raise VersionExistsError(self.key, version.number, max(self.ready, default=version.number))
        self._check(version, step, new)
        step.add(new.turn)
        if new.binding is not None and new.binding.mode == "direct":
            self._supersede(new.binding, version)
        mode = new.binding.mode if new.binding is not None else ""
        if at is None and mode == "direct" and version.number in self.ready and not version.closed:
            version.contributions[new.rank] = new  # one more source to read from
        elif at is None or all(binding is not new.binding for _, binding in version.bindings()):
            self.draining.append(Version(version.number, contributions={new.rank: new}))
        return version

    def _check(self, version: Version, step: Step, new: Contribution) -> None:
        """Give the step up if a share does not fit the others.

        Raises:
            ShareMismatchError: It does not.
            ReplicaMismatchError: It has other bytes.
        """
        of_kind = step.take(self.key, new.turn)
        layout = new.manifest.id if new.manifest is not None else ""
        version.is_familiar = version.is_familiar and self._fitting.get(_place(new)) == layout
        problem = of_kind or version.conflict(new)
        if problem is not None:
            if version.number in self.staging:
                self._abandon(version, str(problem))
            raise problem

    def _supersede(self, binding: Binding, by: Version) -> None:
        """Retire older versions in the same binding: their memory now contains the new version."""
        for version in self._all():
            if version.closed or version is by:
                continue  # once is enough: the first of many shares closes it for all
            if any(old.id == binding.id for _, old in version.bindings()):
                version.closed = True

    def _make_ready(self, version: Version) -> None:
        del self.staging[version.number]
        self.ready[version.number] = version
        if version.step is not None:
            version.step.is_whole = True
            if not version.is_familiar:
                old = version.contributions.values()
                self._fitting = {_place(c): c.manifest.id for c in old if c.manifest is not None}
        version.ready_as = next(self._numbers.ready)
        self.hidden.clear()
        self._note_tiles(version)
        for number in [n for n in self.staging if n < version.number]:
            self._abandon(self.staging[number], f"version {version.number} is whole already")
        # Direct mode: versions in memory that now contains the new one are no longer readable.
        outdated = {n for n, old in self.ready.items() if old.closed and n < version.number}
        current = sorted(self.ready.keys() - outdated)
        for number in sorted(outdated) + current[: -self.keep]:
            self.draining.append(self.ready.pop(number))

    def _note_tiles(self, version: Version) -> None:
        """Keep the certificate of a new version: a reader asks for it after it has the bytes, which may be late."""
        if any(share.tiles is not None for share in version.contributions.values()):
            with suppress(NotCertifiedError):
                self._certified[version.number] = version.tiles()
            for number in sorted(self._certified)[:-CERTIFICATES_KEPT]:
                del self._certified[number]

    def _abandon(self, version: Version, why: str) -> None:
        """Give up an incomplete version."""
        del self.staging[version.number]
        self.draining.append(version)
        if version.step is not None and version.step.is_open:
            version.step.given_up = why

    def idle_versions(self, volume: str) -> list[Version]:
        """Ready versions with memory in a volume that nobody reads, without the newest."""
        return [
            version
            for number, version in self.ready.items()
            if number < max(self.ready)
            and not version.leases
            and any(binding.volume == volume for _, binding in version.bindings())
        ]

    def retire(self, version: Version) -> None:
        """Retire a ready version before it is replaced."""
        self.draining.append(self.ready.pop(version.number))

    def rollback(self, number: int) -> None:
        """Make a kept version the newest again: later ones, including staged ones, are forgotten.

        Raises:
            KeyNotFoundError: It is not kept.
            StoreError: Its bytes are lost, or its publisher has withdrawn it.
        """
        self._exact(number)
        self.draining += [self.ready.pop(later) for later in sorted(self.ready) if later > number]
        for staged in list(self.staging.values()):
            self._abandon(staged, f"the key was rolled back to version {number}")
        self._certified = {n: tiles for n, tiles in self._certified.items() if n <= number}
        self.ready[number].ready_as = next(self._numbers.ready)
        self.hidden.clear()

    # Reading --------------------------------------------------------------------------------------------

    def select(self, selector: Selector) -> Version | None:
        """The selected version, or None: wait for it.

        Raises:
            KeyNotFoundError: There is no such version and none is being published.
            StoreError: Its bytes are lost.
        """
        if selector.beside is not None:
            return self._held(selector.beside, selector.exact or 0)
        if selector.exact is not None:
            return self._exact(selector.exact)
        after, newest = selector.newer_than, self.newest
        if newest is not None and newest.lost is None and (after is None or newest.number > after):
            return None if newest.closed else newest
        readable = [version for n, version in sorted(self.ready.items()) if after is None or n > after]
        whole = [version for version in readable if version.lost is None]
        if whole:
            return None if whole[-1].closed else whole[-1]
        if readable and readable[-1].lost is not None:
            raise readable[-1].lost()
        if after is not None:
            return None
        if self.staging:
            raise self.staging[max(self.staging)].incomplete()
        why = self.steps.given_up()
        raise KeyNotFoundError(
            self.key, f"{self.key!r} has no version: the last step was given up, {why}" if why else None
        )

    def waits_for(self) -> str:
        """What the next version waits for, as text."""
        if self.staging:
            return str(self.staging[max(self.staging)].incomplete())
        why = self.steps.given_up()
        return f"the last step was given up: {why}" if why else ""

    def newest_inline(self) -> tuple[int, bytes]:
        """The version that readers of the newest get, if its value travels inline; else no bytes."""
        try:
            version = self.select(NEWEST)
        except StoreError:
            version = None
        if version is None:
            return 0, b""
        return version.number, next(iter(version.contributions.values())).inline

    def _exact(self, number: int) -> Version:
        version = self.ready.get(number)
        if version is None:
            if number in self.staging:
                raise self.staging[number].incomplete()
            raise VersionNotFoundError(self.key, number, tuple(sorted(self.ready)))
        if version.lost is not None:
            raise version.lost()
        if version.closed:
            raise SourceChangedError(self.key, number, "its publisher has withdrawn it")
        return version

    def _held(self, lease: int, number: int) -> Version:
        """A version that is being read, though newer ones may have replaced it."""
        version = next((version for version in self._all() if lease in version.leases), None)
        if version is None:
            return self._exact(number)
        if version.lost is not None:
            raise version.lost()
        if version.closed:
            raise SourceChangedError(self.key, number, "its publisher has withdrawn it")
        return version

    def lease(self, version: Version, reader: ProcessId) -> int:
        """Keep a version unchanged until `release`."""
        number = next(self._numbers.leases)
        version.leases[number] = reader
        return number

    def leases(self) -> Iterator[tuple[int, ProcessId]]:
        """The readers of versions, by lease number."""
        for version in self._all():
            yield from version.leases.items()

    def release(self, lease: int) -> None:
        """Give back a lease; an unknown one (its holder was considered dead) is ignored."""
        for version in self._all():
            if version.leases.pop(lease, None) is not None:
                version.peer_reads.end(lease)

    def finish(self, lease: int, share: Share | None, *, failed: bool) -> None:
        """End a successful read; the reader may offer its copy to others; see `PeerReadScheduler.finish`."""
        for version in self._all():
            if lease in version.leases:
                version.peer_reads.finish(lease, share, failed=failed)
        self.release(lease)

    # Taking back ----------------------------------------------------------------------------------------

    def withdraw(self, reader: ProcessId) -> None:
        """Send no reader to this reader's copies any more."""
        for version in self._all():
            version.peer_reads.close(reader)

    def withdraw_all(self) -> None:
        """Send no reader to any present reader's copies any more."""
        for version in self._all():
            version.peer_reads.close_all()

    def close(self, publisher: ProcessId) -> None:
        """Direct mode: let no new reader use this process' memory, as publisher or as reader."""
        self.withdraw(publisher)
        for version in self.ready.values():
            if lives_in(version, publisher):
                version.closed = True

    def is_drained(self, publisher: ProcessId) -> bool:
        """Direct mode: whether nobody reads from this process' memory."""
        return not self.readers(publisher)

    def readers(self, publisher: ProcessId) -> tuple[ProcessId, ...]:
        """Direct mode: the processes that read from this process' memory now."""
        versions = [version for version in self._all() if lives_in(version, publisher)]
        of_published = [reader for version in versions for reader in version.leases.values()]
        of_copies = [reader for version in self._all() for reader in version.peer_reads.readers(publisher)]
        return (*of_published, *of_copies)

    def process_died(self, process: ProcessId, reason: str) -> None:
        """Drop a dead process' leases, and steps that cannot complete without it; bytes in its memory are lost."""
        self.steps.process_died(process, reason)
        for version in list(self.staging.values()):
            begun_alone = version.step is None and process in _writers(version)
            given_up = version.step is not None and version.step.given_up
            if begun_alone or given_up or lives_in(version, process):
                self._abandon(version, reason)
        for version in self._all():
            for lease in [n for n, reader in version.leases.items() if reader == process]:
                del version.leases[lease]
                version.peer_reads.end(lease)
                self.spoilt.update(found.id for _, found in version.bindings() if found.mode == "snapshot")
            version.peer_reads.close(process)
            if version.lost is None and lives_in(version, process):
                self._lose(version, process, reason)

    def _lose(self, version: Version, process: ProcessId, reason: str) -> None:
        """Continue with the replicas of bytes in a dead process' memory, if there are any."""
        others = version.without(process) if version.number in self.ready else None
        if others is None:
            version.lost = partial(PublisherLostError, self.key, version.number, reason)
            return
        gone = {rank: old for rank, old in version.contributions.items() if rank not in others}
        version.contributions = others
        self.draining.append(Version(version.number, contributions=gone))

    def concerns(self, process: ProcessId, volumes: list[str]) -> bool:
        """Whether the death of a process, and of volumes with it, can change anything here."""
        if self.staging or self.draining or self.steps.were_taken:
            return True
        for writer, binding in self.memory.values():
            if writer == process or binding.volume in volumes:
                return True
        # A list, since a generator takes longer to make: this runs for every key.
        return bool([version for version in self.ready.values() if version.leases or version.peer_reads.were_made])

    def volume_died(self, volume: str, reason: str) -> None:
        """Drop the copies in a dead volume; a version is lost if some part has no other copy."""
        for version in self._all():
            if version.leave(volume):
                if version.number in self.staging:
                    self._abandon(version, reason)
                version.lost = partial(VolumeLostError, volume, reason)

    def delete(self) -> None:
        """Forget every version; leases may still be held."""
        self.draining += [*self.staging.values(), *self.ready.values()]
        self.staging, self.ready, self._certified = {}, {}, {}
        self.steps.clear()

    def reap(self) -> list[tuple[ProcessId, Binding]]:
        """Remove the replaced versions that nobody reads any more.

        Returns:
            The bindings, with their writers, that no remaining version uses.
        """
        gone = [version for version in self.draining if not version.leases]
        if not gone:
            return []
        self.draining = [version for version in self.draining if version.leases]
        freed = {binding.id: (writer, binding) for version in gone for writer, binding in version.bindings()}
        if not freed:
            return []
        used = {binding.id for version in self._all() for _, binding in version.bindings()}
        return [holder for name, holder in freed.items() if name not in used]

    def uses(self, binding: str) -> bool:
        """Whether some version is in this memory."""
        return any(found.id == binding for version in self._all() for _, found in version.bindings())

    def bindings_of(self, writer: ProcessId) -> set[str]:
        """Ids of the memory that some version uses and this process has written."""
        return {binding.arena_id for version in self._all() for by, binding in version.bindings() if by == writer}

    # Listing --------------------------------------------------------------------------------------------

    def readable(self) -> tuple[int, ...]:
        """The versions that can be read now, oldest first."""
        return tuple(n for n, version in sorted(self.ready.items()) if not version.closed and version.lost is None)

    def certified(self, number: int | None) -> tuple[int, dict[int, TensorsTiles]]:
        """The publishers' certificates for the tiles of a version (None: the newest), and the version's number.

        Raises:
            KeyNotFoundError: There is no such version.
            NotCertifiedError: At least some ranks put it without a certificate.
        """
        if number is None:
            if self.newest is None:
                if self.staging:
                    raise self.staging[max(self.staging)].incomplete()
                raise KeyNotFoundError(self.key)
            number = self.newest.number
        if number in self._certified:
            return number, self._certified[number]
        if number in self.staging:
            raise self.staging[number].incomplete()
        if number not in self.ready:
            raise VersionNotFoundError(self.key, number, tuple(sorted({*self.ready, *self._certified})))
        return number, self.ready[number].tiles()

    @property
    def newest(self) -> Version | None:
        """The newest ready version."""
        return self.ready[max(self.ready)] if self.ready else None

    def names(self, *, with_hidden: bool = False) -> dict[str, None]:
        """The names inside the newest version (only "" for a plain value), without individually deleted ones."""
        names: dict[str, None] = {}
        for manifest in self._newest_manifests():
            if manifest is None or manifest.kind == "value":
                return {"": None}
            names.update(dict.fromkeys([*manifest.tensors, *manifest.objects]))
        return names if with_hidden else {name: None for name in names if name not in self.hidden}

    def holds(self, name: str) -> bool:
        """Whether the newest version is a state dict with an entry of this name."""
        return name not in self.hidden and any(
            manifest is not None
            and manifest.kind == "state_dict"
            and (name in manifest.tensors or name in manifest.objects)
            for manifest in self._newest_manifests()
        )

    def _newest_manifests(self) -> list[Manifest | None]:
        version = self.newest
        return [c.manifest for c in version.contributions.values()] if version is not None else []

    def _all(self) -> list[Version]:
        return [*self.staging.values(), *self.ready.values(), *self.draining]


def _place(contribution: Contribution) -> tuple[int, int]:
    """The rank that has put it and the size of its group, whatever the group's name."""
    return contribution.turn.origin.rank, contribution.turn.origin.size


def _writers(version: Version) -> set[ProcessId]:
    return {contribution.writer for contribution in version.contributions.values()}
