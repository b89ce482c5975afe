"""`FolderSync`: gives a folder on one host the content of a manifest."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Iterable
from typing import IO

from skipper.control.cluster.workspace.chunks import digest
from skipper.control.cluster.workspace.folder import Folder, open_target
from skipper.control.cluster.workspace.manifest import OURS, ChunkReader, Entry, FolderManifest, check, scan
from skipper.control.model.errors import WorkspaceError

MARKER = OURS + "workspace"
"""The file in every folder that a sync has made. It names the running sync, which holds a lock on it."""

_STAGING = OURS + "staging-"
_MOST_TOKEN = 4096


class FolderSync:
    """One sync of one folder: `missing`, then `add` as often as needed, then `commit`; or `close` at any time.

    No existing file changes before `commit`, which first writes the new files next to the old ones and then renames
    them one by one; a reader sees each file either old or new.

    Args:
        target: the folder, whose marker `open_sync` has locked; it is closed with this.
        manifest: its content; it has been checked.
        marker: the marker, open.
    """

    def __init__(self, target: Folder, manifest: FolderManifest, marker: IO[str]) -> None:
        self._target = target
        self._manifest = manifest
        self._marker = marker
        self._old = scan(target, manifest.exclude)
        self._at_hand = self._old.places()
        self._wanted = manifest.places()
        self._check_room()
        self._staging = f"{_STAGING}{secrets.token_hex(8)}"
        self._spool = f"{self._staging}/chunks"
        self._spooled = 0
        target.make_folder(self._staging)
        os.close(target.create(self._spool))

    @property
    def missing(self) -> set[bytes]:
        """The chunks that are not here yet."""
        return self._wanted.keys() - self._at_hand.keys()

    def add(self, chunks: Iterable[bytes | memoryview]) -> int:
        """Keep received chunks. Chunks that are here already, and that only others lack, are not kept.

        Returns:
            How many bytes they have.

        Raises:
            WorkspaceError: the workspace has no such chunk.
        """
        nbytes = 0
        with self._target.parent(self._spool) as (fd, name):
            spool = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        with os.fdopen(spool, "ab") as file:
            for chunk in chunks:
                key = digest(chunk)
                if key not in self._wanted:
                    raise WorkspaceError("a received chunk belongs to no file of the workspace")
                nbytes += len(chunk)
                if key not in self._at_hand:
                    file.write(chunk)
                    self._at_hand[key] = (self._spool, self._spooled, len(chunk))
                    self._spooled += len(chunk)
        return nbytes

    def commit(self) -> tuple[str, ...]:
        """Give the folder the content of the manifest.

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
            self._target.rename(path, entry.path)
        for entry in reversed(self._manifest.entries):  # a folder after its content: it may be unwritable then
            if not stat.S_ISLNK(entry.mode):
                self._target.chmod(entry.path, entry.permissions)
        return tuple(entry.path for entry in changed)

    def close(self) -> None:
        """Remove the staged files and release the lock; idempotent."""
        if self._target.fd >= 0:
            self._target.remove(self._staging, ignore_errors=True)
        self._marker.close()
        self._target.close()

    def _check_room(self) -> None:
        """Refuse content that is too large for the disk before any of it is sent."""
        disk = os.fstatvfs(self._target.fd)
        needed, free = sum(self._wanted[name][2] for name in self.missing), disk.f_bavail * disk.f_frsize
        if needed > free:
            raise WorkspaceError(f"{self._target.path} has {free} bytes free, and the sync needs {needed} more")

    def _write(self, entry: Entry) -> str:
        """Write the new content of a file into a staging file."""
        path = f"{self._staging}/{secrets.token_hex(8)}"
        with os.fdopen(self._target.create(path), "wb") as file, ChunkReader(self._target) as chunks:
            for chunk in entry.chunks:
                file.write(chunks.read(chunk.digest, *self._at_hand[chunk.digest]))
        return path

    def _clear(self, wanted: dict[str, Entry], before: dict[str, Entry]) -> None:
        """Remove what is not wanted, or has another kind; the content of a folder before the folder."""
        for path, entry in reversed(before.items()):
            new = wanted.get(path)
            if new is not None and stat.S_IFMT(new.mode) == stat.S_IFMT(entry.mode):
                continue
            if not entry.is_folder:
                self._target.unlink(path)
            elif new is None:
                self._target.remove_if_empty(path)  # it may contain something excluded
            else:
                self._target.remove(path)

    def _shape(self, entry: Entry, before: Entry | None) -> None:
        """Make a folder or a link."""
        if entry.is_folder:
            self._target.make_folder(entry.path)
            self._target.chmod(entry.path, entry.permissions | stat.S_IRWXU)
        elif entry.link and (before is None or before.link != entry.link):
            self._target.link(entry.path, entry.link)


def open_sync(target: str, manifest: FolderManifest, token: str) -> FolderSync | None:
    """Open a folder as the target of a sync.

    Args:
        target: the folder; it is made if it does not exist.
        manifest: its content.
        token: names this sync.

    Returns:
        The sync; None if another host syncs the same folder for the same sync, on a shared file system.

    Raises:
        WorkspaceError: the folder is not empty and was not made by a sync, so that nothing in it may be replaced;
            another sync is running on it; others may write to it, or replace it; or the manifest reaches beyond it.
        OSError: it cannot be made, read or written.
    """
    check(manifest)
    folder = open_target(target)
    try:
        marker = _locked_marker(folder, token)
        if marker is None:
            folder.close()
            return None
        try:
            for name in os.listdir(folder.fd):
                if name.startswith(_STAGING):  # from a killed sync
                    folder.remove(name)
            return FolderSync(folder, manifest, marker)
        except BaseException:
            marker.close()
            raise
    except BaseException:
        folder.close()
        raise


def _locked_marker(folder: Folder, token: str) -> IO[str] | None:
    """The marker of a folder, which now names this sync; None if it did so already."""
    names = os.listdir(folder.fd)
    if MARKER not in names and names:
        raise WorkspaceError(f"{folder.path} is not empty and was not made by sync_workspace: choose another target")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    marker = os.fdopen(os.open(MARKER, flags, 0o600, dir_fd=folder.fd), "r+", encoding="utf-8")
    try:
        status = os.fstat(marker.fileno())
        folder.check_owner(status, MARKER)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise WorkspaceError(f"{MARKER} in {folder.path} was not written by a sync")
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if marker.read(_MOST_TOKEN) == token:
                marker.close()
                return None
            raise WorkspaceError(f"another sync is running on {folder.path}") from None
        os.fchmod(marker.fileno(), 0o600)
        marker.truncate(0)
        marker.write(token)
        marker.flush()
    except BaseException:
        marker.close()
        raise
    return marker


def _same(old: Entry | None, new: Entry) -> bool:
    return old is not None and old.is_file and old.chunks == new.chunks
