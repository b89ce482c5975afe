"""Manifests of workspaces, from the first look to the last rename, as targets call them.

Not as root: a manifest that gets out of its folder must not be able to do much.
"""

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from skipper.control.cluster.workspace.chunks import FileChunk, digest
from skipper.control.cluster.workspace.folder_sync import open_sync
from skipper.control.cluster.workspace.manifest import Entry, FolderManifest
from tests.fuzz.mutation import parts_in_json
from tests.fuzz.verdicts import Broken, Void

_NOBODY = 65_534
_SECRET = "nobody has touched this\n"


@cache
def _folder() -> Path:
    """A folder with a neighbour in it that is not to be touched, for a user who may do nothing else."""
    folder = Path(tempfile.mkdtemp(prefix="workspace-"))
    (folder / "neighbour").mkdir()
    if os.geteuid() == 0:
        for path in (folder, folder / "neighbour"):
            os.chown(path, _NOBODY, _NOBODY)
        os.setgroups([])
    return folder


@contextlib.contextmanager
def _not_as_root() -> Iterator[None]:
    if os.geteuid() != 0:
        yield
        return
    os.setegid(_NOBODY)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def sync(data: bytes) -> None:
    """Two syncs of one folder, the second over what the first has left."""
    first, second, exclude = parts_in_json(data, 3)
    folder = _folder()
    with _not_as_root():
        _sync_twice(folder, first, second, exclude)


def _sync_twice(folder: Path, first: Any, second: Any, exclude: Any) -> None:
    target, secret = folder / "target", folder / "neighbour" / "secret"
    secret.write_text(_SECRET)
    secret.chmod(0o600)
    before = _outside(folder)
    try:
        for token, entries in (("one", first), ("two", second)):
            _sync(str(target), entries, exclude, token)
    finally:
        after = _outside(folder)
        odd = [path for path in target.rglob("*") if path.lstat().st_mode & (stat.S_ISUID | stat.S_ISGID)]
        _remove(target)
        if after != before:
            raise Broken(f"a sync has changed what is beside its folder: {before} became {after}")
        if odd:
            raise Broken(f"set-user-ID or set-group-ID bits: {odd}")


def _sync(target: str, entries: Any, exclude: Any, token: str) -> None:
    contents: dict[bytes, bytes] = {}
    try:
        made = [_entry(*entry, contents) for entry in entries]
        manifest = FolderManifest(tuple(made), tuple(exclude))
    except TypeError:
        raise Void from None
    sync = open_sync(target, manifest, token)
    if sync is not None:
        try:
            sync.add([contents[name] for name in sorted(sync.missing)])
            sync.commit()
        finally:
            sync.close()


def _entry(path: Any, mode: Any, texts: Any, link: Any, contents: dict[bytes, bytes]) -> Entry:
    chunks = []
    for text in texts:
        content = str(text).encode("utf-8", "replace") or b"-"
        contents[digest(content)] = content
        chunks.append(FileChunk(digest(content), len(content)))
    return Entry(path, mode, tuple(chunks), link)


def _outside(folder: Path) -> list[tuple[str, int, str]]:
    found = []
    for path in sorted(folder.rglob("*")):
        if path.relative_to(folder).parts[0] != "target":
            status = path.lstat()
            content = path.read_text() if stat.S_ISREG(status.st_mode) else ""
            found.append((str(path.relative_to(folder)), status.st_mode, content))
    return found


def _remove(target: Path) -> None:
    for path in (target, *target.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(target, ignore_errors=True)


def seeds() -> Iterator[bytes]:
    """Files, folders and a link within; and what a sync has to refuse."""
    folder, file, link = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o644, stat.S_IFLNK | 0o777
    plain = [["a", folder, [], ""], ["a/b.py", file, ["print(1)\n", "tail"], ""], ["c", file, [], ""]]
    more = [["a", folder, [], ""], ["a/b.py", file, ["print(2)\n"], ""], ["to", link, [], "a/b.py"]]
    yield json.dumps([plain, more, ["*.pyc"]]).encode()
    yield json.dumps([more, plain, []]).encode()
    yield json.dumps([[["neighbour", link, [], "../neighbour"]], [["neighbour", folder, [], ""]], []]).encode()
    yield json.dumps([[["../neighbour/secret", file | stat.S_ISUID, ["mine"], ""]], [], []]).encode()
