"""`FolderManifest`: a folder's content, as names of chunks. `scan` reads it from disk; `check` is for received ones."""

from __future__ import annotations

import fnmatch
import mmap
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from skipper.control.cluster.workspace.chunks import HASH_NBYTES, LARGEST, FileChunk, cut, digest
from skipper.control.cluster.workspace.folder import OTHERS_WRITE, Folder
from skipper.control.model.errors import WorkspaceError

OURS = ".skipper-"
"""Prefix of the names of a sync's own files in a folder; they are in no manifest."""

MAX_ENTRIES = 1 << 20
MAX_CHUNKS = 1 << 26
"""Limits for a manifest; this many of the smallest chunks are 256 GiB."""

_MOST_PATH_NBYTES = 4095
_MOST_NAME_NBYTES = 255
"""Limits of Linux: PATH_MAX without its final zero, and NAME_MAX (limits.h)."""

_MOST_LINKS = 40
_MOST_PATTERNS = 1024
_PERMISSIONS = 0o777 & ~OTHERS_WRITE

_Stamp = tuple[int, int, int, int, int]
_known: dict[str, tuple[_Stamp, tuple[FileChunk, ...]]] = {}
"""The chunks of files that this process has read, with the file's status at that time."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, folder or symbolic link.

    Attributes:
        path: relative to the folder, with slashes.
        mode: type and permissions, as in ``st_mode``.
        chunks: of a file, in their order.
        link: where a symbolic link points.
    """

    path: str
    mode: int
    chunks: tuple[FileChunk, ...] = ()
    link: str = ""

    @property
    def is_file(self) -> bool:
        """Whether it has content."""
        return stat.S_ISREG(self.mode)

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return stat.S_ISDIR(self.mode)

    @property
    def permissions(self) -> int:
        """Its permissions at the target: others cannot write; no set-user-ID, set-group-ID or sticky bit."""
        return self.mode & _PERMISSIONS


@dataclass(frozen=True, slots=True)
class FolderManifest:
    """Everything in a folder except what is excluded; folders come before their content.

    Attributes:
        entries: its entries.
        exclude: patterns of excluded names, as for `fnmatch`.
    """

    entries: tuple[Entry, ...]
    exclude: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """The size of all files together."""
        return sum(chunk.nbytes for entry in self.entries for chunk in entry.chunks)

    def places(self) -> dict[bytes, tuple[str, int, int]]:
        """The place of each chunk: path, offset and size; one of them if there are several."""
        found: dict[bytes, tuple[str, int, int]] = {}
        for entry in self.entries:
            offset = 0
            for chunk in entry.chunks:
                found.setdefault(chunk.digest, (entry.path, offset, chunk.nbytes))
                offset += chunk.nbytes
        return found


def scan(folder: Folder, exclude: Sequence[str]) -> FolderManifest:
    """Read a folder. Files that have not changed since this process last read them are not read again.

    Anything but files, folders and symbolic links is skipped.

    Raises:
        WorkspaceError: something in it was replaced during the scan, or belongs to another user although all must be
            this user's.
        OSError: something in it cannot be read.
    """
    return FolderManifest(tuple(_entries(folder, folder.fd, "", exclude)), tuple(exclude))


def check(manifest: FolderManifest) -> None:
    """Check that a manifest, wherever it came from, does not reach beyond its folder.

    Raises:
        WorkspaceError: a path is absolute, contains ``..`` or names a sync's own file; an entry has an unknown kind, is
            there twice, or is inside of something other than a folder; a link leads outside; a chunk has an invalid
            size; there is too much of something.
    """
    _require(len(manifest.entries) <= MAX_ENTRIES, f"it has more than {MAX_ENTRIES} entries")
    _require(len(manifest.exclude) <= _MOST_PATTERNS, f"it has more than {_MOST_PATTERNS} patterns")
    _require(all(isinstance(pattern, str) for pattern in manifest.exclude), "a pattern is not a text")
    kinds: dict[str, int] = {}
    sizes: dict[bytes, int] = {}
    chunks = 0
    for entry in manifest.entries:
        _check_path(entry.path, manifest.exclude)
        above = entry.path.rpartition("/")[0]
        _require(entry.path not in kinds, f"{entry.path!r} is there twice")
        _require(
            not above or kinds.get(above) == stat.S_IFDIR, f"{entry.path!r} is inside something that is not a folder"
        )
        _require(type(entry.mode) is int and 0 <= entry.mode < 1 << 16, f"{entry.path!r} has no mode")
        kind = kinds[entry.path] = stat.S_IFMT(entry.mode)
        _require(kind in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK), f"{entry.path!r} is not a file, folder or link")
        _require(entry.is_file or not entry.chunks, f"{entry.path!r} is not a file and has content")
        _require(bool(entry.link) == (kind == stat.S_IFLNK), f"{entry.path!r} is a link to nowhere, or none")
        chunks += len(entry.chunks)
        _require(chunks <= MAX_CHUNKS, f"it has more than {MAX_CHUNKS} chunks")
        for chunk in entry.chunks:
            _require(isinstance(chunk.digest, bytes) and len(chunk.digest) == HASH_NBYTES, "a chunk has no name")
            _require(type(chunk.nbytes) is int and 0 < chunk.nbytes <= LARGEST, "a chunk has no size that chunks have")
            _require(sizes.setdefault(chunk.digest, chunk.nbytes) == chunk.nbytes, "a chunk has two sizes")
    links = {entry.path: entry.link for entry in manifest.entries if entry.link}
    for path, link in links.items():
        _require(_is_text(link, _MOST_PATH_NBYTES), f"{path!r} links to something that is not a path")
        if _leads_outside(path, link, links):
            raise WorkspaceError(
                f"the link {path!r} leads out of the workspace, to {link!r}: exclude it by its name, or put in its "
                "place what it points to"
            )


class ChunkReader:
    """Reads chunks from files of a folder, at the places in a manifest; a context manager.

    A file stays open until another one is read from, since chunks of one file follow each other.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._path: str | None = None
        self._file: IO[bytes] | None = None

    def read(self, name: bytes, path: str, offset: int, nbytes: int) -> bytes:
        """The bytes of a chunk.

        Raises:
            WorkspaceError: the bytes there have another name by now.
            OSError: the file cannot be read.
        """
        if self._file is None or path != self._path:
            self.close()
            self._file, self._path = os.fdopen(self._folder.open_file(path), "rb"), path
        self._file.seek(offset)
        data = self._file.read(nbytes)
        if digest(data) != name:
            raise WorkspaceError(f"{path} in {self._folder.path} was changed while the workspace was being synced")
        return data

    def close(self) -> None:
        """Close the open file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def is_excluded(name: str, exclude: Sequence[str]) -> bool:
    """Whether something with this name, with its content, is excluded."""
    return name.startswith(OURS) or any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)


def _entries(folder: Folder, fd: int, within: str, exclude: Sequence[str]) -> Iterator[Entry]:
    with os.scandir(fd) as items:
        ordered = sorted(items, key=lambda item: item.name)
        statuses = [item.stat(follow_symlinks=False) for item in ordered]
    for item, status in zip(ordered, statuses, strict=True):
        if is_excluded(item.name, exclude):
            continue
        path = f"{within}/{item.name}" if within else item.name
        folder.check_owner(status, path)
        if stat.S_ISLNK(status.st_mode):
            yield Entry(path, status.st_mode, link=os.readlink(item.name, dir_fd=fd))
        elif stat.S_ISDIR(status.st_mode):
            yield Entry(path, status.st_mode)
            inner = folder.enter(fd, item.name)
            try:
                yield from _entries(folder, inner, path, exclude)
            finally:
                os.close(inner)
        elif stat.S_ISREG(status.st_mode):
            with os.fdopen(folder.open_in(fd, item.name), "rb") as file:
                yield Entry(path, status.st_mode, _chunks(os.path.join(folder.path, path), file))


def _chunks(path: str, file: IO[bytes]) -> tuple[FileChunk, ...]:
    status = os.fstat(file.fileno())
    stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    known = _known.get(path)
    if known is not None and known[0] == stamp:
        return known[1]
    if not status.st_size:
        return ()
    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # closed with the last view of it
    chunks = tuple(FileChunk(digest(piece), len(piece)) for piece in cut(content))
    _known[path] = stamp, chunks
    return chunks


def _check_path(path: str, exclude: Sequence[str]) -> None:
    _require(_is_text(path, _MOST_PATH_NBYTES), "a path is not valid")
    for name in path.split("/"):
        _require(name not in ("", ".", ".."), f"{path!r} is absolute, or has an empty component, '.' or '..'")
        _require(_is_text(name, _MOST_NAME_NBYTES), f"a name in {path[:100]!r} is too long")
        _require(not is_excluded(name, exclude), f"{path!r} is excluded, or belongs to the sync itself")


def _is_text(text: object, most_nbytes: int) -> bool:
    """Whether this is a valid path for the system."""
    if not isinstance(text, str) or "\0" in text:
        return False
    try:
        return 0 < len(os.fsencode(text)) <= most_nbytes
    except UnicodeEncodeError:
        return False


def _leads_outside(path: str, link: str, links: Mapping[str, str]) -> bool:
    """Whether a link leads out of its folder on the way to its target; ``links`` are all links in the folder."""
    here = path.split("/")[:-1]
    followed, waiting = 0, [link]
    while waiting:
        step = waiting.pop()
        if step.startswith("/"):
            return True
        name, _, rest = step.partition("/")
        if rest := rest.lstrip("/"):
            waiting.append(rest)
        if name == "..":
            if not here:
                return True
            here.pop()
        elif name not in ("", "."):
            here.append(name)
            onward = links.get("/".join(here))
            if onward is not None:
                here.pop()
                followed += 1
                if followed > _MOST_LINKS:
                    return False  # it leads nowhere: the system stops following
                waiting.append(onward)
    return False


def _require(is_so: bool, problem: str) -> None:
    if not is_so:
        raise WorkspaceError(f"this is not a manifest of a workspace: {problem}")
