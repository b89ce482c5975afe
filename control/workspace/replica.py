"""`Replica`: a folder on one host on its way from what it holds to what a manifest says."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from typing import IO

from control.errors import WorkspaceError
from control.workspace.chunks import digest
from control.workspace.manifest import OURS, ChunkReader, Entry, Manifest, scan

MARKER = OURS + "workspace"
"""The file in every folder that was made by a sync. It names the sync that is at work, which holds a lock on it."""

_STAGING = OURS + "staging-"


class Replica:
    """One sync of one folder: `missing`, then `add` as often as needed, then `commit`; or `close` at any time.

    Nothing that was there changes before `commit`, which puts the new files beside the old ones first and then renames
    them one by one; a reader sees each file as it was or as it will be.

    Args:
        target: the folder, whose marker `open_replica` has locked.
        manifest: what it is to hold.
        marker: the marker, open.
    """

    def __init__(self, target: str, manifest: Manifest, marker: IO[str]) -> None:
        self._target = target
        self._manifest = manifest
        self._marker = marker
        self._old = scan(target, manifest.exclude)
        self._at_hand = {name: (self._path(path), at, size) for name, (path, at, size) in self._old.places().items()}
        self._staging = tempfile.mkdtemp(prefix=_STAGING, dir=target)
        self._spool = os.path.join(self._staging, "chunks")
        self._spooled = 0

    @property
    def missing(self) -> set[bytes]:
        """The chunks that are not here yet."""
        return {chunk.digest for entry in self._manifest.entries for chunk in entry.chunks} - set(self._at_hand)

    def add(self, chunks: Iterable[bytes | memoryview]) -> int:
        """Keep chunks that have been sent.

        Returns:
            How many bytes they had.
        """
        before = self._spooled
        with open(self._spool, "ab") as file:
            for chunk in chunks:
                file.write(chunk)
                self._at_hand.setdefault(digest(chunk), (self._spool, self._spooled, len(chunk)))
                self._spooled += len(chunk)
        return self._spooled - before

    def commit(self) -> tuple[str, ...]:
        """Make the folder what the manifest says.

        Returns:
            The files whose content has changed, by their paths in the folder.

        Raises:
            WorkspaceError: chunks are missing.
        """
        if missing := self.missing:
            raise WorkspaceError(f"{len(missing)} chunks of the workspace have not arrived")
        before = {entry.path: entry for entry in self._old.entries}
        changed = [
            entry for entry in self._manifest.entries if entry.is_file and not _same(before.get(entry.path), entry)
        ]
        written = [(entry, self._write(entry)) for entry in changed]
        self._clear({entry.path: entry for entry in self._manifest.entries}, before)
        for entry in self._manifest.entries:
            self._shape(entry, before.get(entry.path))
        for entry, path in written:
            os.replace(path, self._path(entry.path))
        for entry in self._manifest.entries:
            if not stat.S_ISLNK(entry.mode):
                os.chmod(self._path(entry.path), stat.S_IMODE(entry.mode))
        return tuple(entry.path for entry in changed)

    def close(self) -> None:
        """Give back what is not needed any more, and the lock; it may be called again."""
        shutil.rmtree(self._staging, ignore_errors=True)
        self._marker.close()

    def _path(self, path: str) -> str:
        return os.path.join(self._target, path)

    def _write(self, entry: Entry) -> str:
        """The new content of a file, in a file of its own."""
        path = os.path.join(self._staging, secrets.token_hex(8))
        with open(path, "xb") as file, ChunkReader() as chunks:
            for chunk in entry.chunks:
                file.write(chunks.read(chunk.digest, *self._at_hand[chunk.digest]))
        return path

    def _clear(self, wanted: dict[str, Entry], before: dict[str, Entry]) -> None:
        """Remove what is not wanted, or not of that kind; what is in a folder before the folder."""
        for path, entry in reversed(before.items()):
            new = wanted.get(path)
            if new is not None and stat.S_IFMT(new.mode) == stat.S_IFMT(entry.mode):
                continue
            if not entry.is_folder:
                os.unlink(self._path(path))
            elif new is None:
                with suppress(OSError):  # it holds something that is excluded
                    os.rmdir(self._path(path))
            else:
                shutil.rmtree(self._path(path))

    def _shape(self, entry: Entry, before: Entry | None) -> None:
        """Make a folder or a link."""
        path = self._path(entry.path)
        if entry.is_folder:
            os.makedirs(path, exist_ok=True)
        elif entry.link and (before is None or before.link != entry.link):
            with suppress(FileNotFoundError):
                os.unlink(path)
            os.symlink(entry.link, path)


def open_replica(target: str, manifest: Manifest, token: str) -> Replica | None:
    """Make a folder the target of a sync.

    Args:
        target: the folder; it is made if it is not there.
        manifest: what it is to hold.
        token: names this sync.

    Returns:
        The replica; None where another host has the same folder in hand for the same sync, by a shared file system.

    Raises:
        WorkspaceError: the folder holds something and was not made by a sync, so that nothing in it may be replaced; or
            another sync is at work on it.
        OSError: it cannot be made, read or written.
    """
    os.makedirs(target, exist_ok=True)
    path = os.path.join(target, MARKER)
    if not os.path.exists(path) and os.listdir(target):
        raise WorkspaceError(f"{target} is not empty and was not made by sync_workspace: choose another target")
    marker = open(path, "a+", encoding="utf-8")  # noqa: SIM115  (the replica closes it)
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with marker:
            marker.seek(0)
            if marker.read() == token:
                return None
        raise WorkspaceError(f"another sync is at work on {target}") from None
    marker.truncate(0)
    marker.write(token)
    marker.flush()
    for name in os.listdir(target):
        if name.startswith(_STAGING):  # of one that was killed
            shutil.rmtree(os.path.join(target, name))
    return Replica(target, manifest, marker)


def _same(old: Entry | None, new: Entry) -> bool:
    return old is not None and old.is_file and old.chunks == new.chunks
