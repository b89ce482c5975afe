"""What a folder holds, as names of chunks: `Manifest`, and `scan`, which reads it off the disk."""

from __future__ import annotations

import fnmatch
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO

from control.errors import WorkspaceError
from control.workspace.chunks import Chunk, cut, digest

OURS = ".skipper-"
"""How names begin of what a sync keeps in a folder for itself; it is in no manifest."""

_Stamp = tuple[int, int, int, int, int]
_known: dict[str, tuple[_Stamp, tuple[Chunk, ...]]] = {}
"""The chunks of files that this process has read, with what the system said of the file then."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, folder or symbolic link.

    Attributes:
        path: relative to the folder, with slashes.
        mode: type and permissions, as ``st_mode`` has them.
        chunks: of a file, in their order.
        link: where a symbolic link points.
    """

    path: str
    mode: int
    chunks: tuple[Chunk, ...] = ()
    link: str = ""

    @property
    def is_file(self) -> bool:
        """Whether it has content."""
        return stat.S_ISREG(self.mode)

    @property
    def is_folder(self) -> bool:
        """Whether it holds others."""
        return stat.S_ISDIR(self.mode)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything in a folder but what is excluded; folders come before what is in them.

    Attributes:
        entries: see there.
        exclude: patterns of names that are left alone, as `fnmatch` has them.
    """

    entries: tuple[Entry, ...]
    exclude: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Of all files together."""
        return sum(chunk.nbytes for entry in self.entries for chunk in entry.chunks)

    def places(self) -> dict[bytes, tuple[str, int, int]]:
        """Where each chunk lies: path, offset and size; one place for each, if there are several."""
        found: dict[bytes, tuple[str, int, int]] = {}
        for entry in self.entries:
            offset = 0
            for chunk in entry.chunks:
                found.setdefault(chunk.digest, (entry.path, offset, chunk.nbytes))
                offset += chunk.nbytes
        return found


def scan(root: str, exclude: Sequence[str]) -> Manifest:
    """Read a folder. Files that have not changed since this process read them last are not read again.

    What is neither a file nor a folder nor a symbolic link is passed over.

    Raises:
        OSError: something in it cannot be read.
    """
    return Manifest(tuple(_entries(root, "", exclude)), tuple(exclude))


class ChunkReader:
    """Reads chunks from files, as a manifest says where they lie; a context manager.

    A file stays open until another one is read from, since chunks of one file follow each other.
    """

    def __init__(self) -> None:
        self._path: str | None = None
        self._file: IO[bytes] | None = None

    def read(self, name: bytes, path: str, offset: int, nbytes: int) -> bytes:
        """The bytes of a chunk.

        Raises:
            WorkspaceError: they are not those of this name any more.
            OSError: the file cannot be read.
        """
        if self._file is None or path != self._path:
            self.close()
            self._file, self._path = open(path, "rb"), path  # noqa: SIM115  (`close` closes it)
        self._file.seek(offset)
        data = self._file.read(nbytes)
        if digest(data) != name:
            raise WorkspaceError(f"{path} was changed while the workspace was being synced")
        return data

    def close(self) -> None:
        """Close the file that is open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def is_excluded(name: str, exclude: Sequence[str]) -> bool:
    """Whether something of this name is left alone, and all that is in it."""
    return name.startswith(OURS) or any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)


def _entries(root: str, folder: str, exclude: Sequence[str]) -> Iterator[Entry]:
    with os.scandir(os.path.join(root, folder)) as items:
        ordered = sorted(items, key=lambda item: item.name)
    for item in ordered:
        if is_excluded(item.name, exclude):
            continue
        path = f"{folder}/{item.name}" if folder else item.name
        mode = item.stat(follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            yield Entry(path, mode, link=os.readlink(item.path))
        elif stat.S_ISDIR(mode):
            yield Entry(path, mode)
            yield from _entries(root, path, exclude)
        elif stat.S_ISREG(mode):
            yield Entry(path, mode, _chunks(item.path))


def _chunks(path: str) -> tuple[Chunk, ...]:
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        known = _known.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        if not status.st_size:
            return ()
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # closed with the last view of it
        chunks = tuple(Chunk(digest(piece), len(piece)) for piece in cut(content))
    _known[path] = stamp, chunks
    return chunks
