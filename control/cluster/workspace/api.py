"""The public interface of `sync_workspace`."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skipper.control.api.mesh import ProcMesh
from skipper.control.cluster.workspace.folder import Folder, open_source
from skipper.control.cluster.workspace.manifest import ChunkReader, FolderManifest, check, scan
from skipper.control.cluster.workspace.receiver import ChunkBatch, Subtree, WorkspaceReceiver, token_name
from skipper.control.model.errors import ControlError
from skipper.control.model.progress import track_progress

if TYPE_CHECKING:
    from skipper.control.api.views import ActorMesh

EXCLUDE = (".git", "__pycache__", "*.pyc", ".venv", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints")

_FANOUT = 4
_BATCH_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The result of `sync_workspace`.

    Attributes:
        hosts: names of the hosts whose folder was compared; without those that see the script's folder itself.
        nbytes: bytes of all files in the folder.
        moved: bytes of content that were sent to all hosts together.
        changed: files whose content has changed on at least one host, by their paths in the folder.
        reloaded: modules that were imported again in at least one process.
        seconds: how long it took.

    Example:
        ```python
        import tempfile
        from pathlib import Path

        from skipper.control import this_host
        from skipper.control.cluster.workspace import SyncReport, sync_workspace

        procs = this_host().spawn_procs({"gpus": 2})
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "source"), Path(folder, "target")
            source.mkdir()
            (source / "task.py").write_text("REWARD = 1")
            report: SyncReport = sync_workspace(procs, source, target)
            print(report.changed, report.moved)  # ('task.py',) 10
        ```
    """

    hosts: tuple[str, ...]
    nbytes: int
    moved: int
    changed: tuple[str, ...]
    reloaded: tuple[str, ...]
    seconds: float


def sync_workspace(
    procs: ProcMesh,
    source: str | os.PathLike[str] = ".",
    target: str | os.PathLike[str] | None = None,
    *,
    exclude: Sequence[str] = EXCLUDE,
    reload: bool = False,
    timeout: float = 600.0,
) -> SyncReport:
    """Copy a folder to every host of a mesh: files, folders, symbolic links and permissions.

    Permissions for other users to write are not copied, nor are set-user-ID, set-group-ID and sticky bits. A symbolic
    link has to point to a place within the folder.

    Contents are compared by the hashes of chunks, and only chunks that a host does not have in its folder are sent,
    from the script to four hosts and from each of these to four others. The new files replace the old ones when all
    hosts have all of theirs; what is not in ``source`` any more is removed. One process of each host does the work.

    Args:
        procs: processes on the hosts.
        source: the folder here.
        target: the folder there: an absolute path without ``..``. It must be empty, absent or the target of an earlier
            sync, and belong to this user. Other users must not be able to write to it or to replace it: folders and
            links above it belong to this user or root, and others can write to them only if they are sticky, such as
            ``/tmp``. Missing folders are created with mode 0700. None uses the path of ``source``; hosts on which that
            is the same folder are skipped.
        exclude: patterns (`fnmatch`) of names that are neither sent nor removed.
        reload: import modules whose files have changed again, in every process of ``procs`` that has imported them.
        timeout: seconds for each of the steps: comparing, sending about 64 MiB, replacing files, importing.

    Raises:
        NotADirectoryError: ``source`` is not a folder.
        ValueError: ``target`` is not an absolute path, or is inside of ``source``, or ``source`` inside of it.
        WorkspaceError: a file changed during the sync, or a link points out of ``source``; or, as the cause of an
            `ActorError`, a target has content that no sync has put there, or is open to other users.
        ActorError: something failed on a host, such as a full disk; its folder is as it was, unless the new files were
            being put in place.
        SupervisionError: a host was lost during the sync. The folders of the others are unchanged, or new; repeat the
            sync without that host.
        DeadlineError: a step took longer than ``timeout``.
    """
    begin = time.monotonic()
    root = os.path.realpath(source)
    if not os.path.isdir(root):
        raise NotADirectoryError(f"{os.fspath(source)} is not a folder")
    there = root if target is None else os.fspath(target)
    if not os.path.isabs(there):
        raise ValueError(f"the target must be an absolute path, not {there!r}: hosts do not share a folder")
    if "\0" in there or ".." in there.split("/"):
        raise ValueError(f"the target must be a path without '..', not {there!r}")
    if there != root and os.path.commonpath([there, root]) in (there, root):
        raise ValueError(f"{there} and {root} overlap: one is inside the other")
    with open_source(root) as folder:
        manifest = scan(folder, exclude)
        check(manifest)
        return _sync(procs, folder, there, manifest, reload=reload, timeout=timeout, begin=begin)


def _sync(
    procs: ProcMesh, folder: Folder, there: str, manifest: FolderManifest, *, reload: bool, timeout: float, begin: float
) -> SyncReport:
    files = {entry.path for entry in manifest.entries if entry.is_file}
    receivers: ActorMesh[Any] = procs.flatten("hosts").spawn("workspace", WorkspaceReceiver)
    try:
        hosts = _one_of_each(receivers, timeout)
        moved, hosts = _bring(folder, there, manifest, hosts, timeout)
        changed: set[str] = set()
        for future in [receiver.commit.call_one() for receiver in hosts.values()]:
            changed.update(files.intersection(future.get(timeout)))
        reloaded: set[str] = set()
        if reload and changed:
            for names in receivers.reload.call(there, tuple(changed)).get(timeout):
                reloaded.update(names)
    finally:
        with suppress(ControlError):  # the earlier error is the one that matters
            receivers.stop().get(timeout)
    return SyncReport(
        tuple(hosts), manifest.nbytes, moved, tuple(sorted(changed)), tuple(sorted(reloaded)), time.monotonic() - begin
    )


def _one_of_each(receivers: ActorMesh[Any], timeout: float) -> dict[str, ActorMesh[Any]]:
    """One receiver per host, by the host's name."""
    found: dict[str, tuple[str, int]] = {}
    for rank, (identity, name) in enumerate(receivers.host.call().get(timeout)):
        found.setdefault(identity, (name, rank))
    names: dict[str, ActorMesh[Any]] = {}
    for name, rank in found.values():
        names[name if name not in names else f"{name} ({rank})"] = receivers.slice(hosts=rank)
    return names


def _bring(
    folder: Folder, target: str, manifest: FolderManifest, hosts: dict[str, ActorMesh[Any]], timeout: float
) -> tuple[int, dict[str, ActorMesh[Any]]]:
    """Send every host what it lacks; returns how many bytes were sent, and the hosts that have their own folder."""
    with _token(folder) as token:
        asked = {name: receiver.begin.call_one(target, token, manifest) for name, receiver in hosts.items()}
        missing = {}
        with track_progress("compare workspace", len(asked), "hosts", names=asked) as task:
            for name, future in asked.items():
                missing[name] = future.get(timeout)
                task.advance(name=name)
    needed: set[bytes] = set().union(*(chunks for chunks in missing.values() if chunks))
    tree = _tree([hosts[name] for name, chunks in missing.items() if chunks])
    moved = 0
    total = sum(nbytes for name, (_, _, nbytes) in manifest.places().items() if name in needed)
    with track_progress("send workspace", total, "bytes") as task:
        for batch in _batches(folder, manifest, needed):
            futures = [branch.receiver.take.call_one(batch, branch.below) for branch in tree]
            moved += sum(future.get(timeout) for future in futures)
            task.advance(sum(batch.sizes))
    return moved, {name: hosts[name] for name, chunks in missing.items() if chunks is not None}


@contextmanager
def _token(folder: Folder) -> Iterator[str]:
    """A secret that is in a file of the folder during the context."""
    token = secrets.token_hex(16)
    name = token_name(token)
    with os.fdopen(folder.create(name), "wb") as file:
        file.write(token.encode())
    try:
        yield token
    finally:
        folder.unlink(name)


def _tree(receivers: Sequence[ActorMesh[Any]]) -> tuple[Subtree, ...]:
    """Receivers in branches of similar sizes, at most `_FANOUT` at each node."""
    groups = [receivers[start::_FANOUT] for start in range(min(_FANOUT, len(receivers)))]
    return tuple(Subtree(group[0], _tree(group[1:])) for group in groups)


def _batches(folder: Folder, manifest: FolderManifest, needed: set[bytes]) -> Iterator[ChunkBatch]:
    """The contents of the needed chunks, in batches."""
    chunks: list[bytes] = []
    size = 0
    with ChunkReader(folder) as reader:
        for name, (path, offset, nbytes) in manifest.places().items():
            if name not in needed:
                continue
            chunks.append(reader.read(name, path, offset, nbytes))
            size += nbytes
            if size >= _BATCH_NBYTES:
                yield ChunkBatch(b"".join(chunks), tuple(map(len, chunks)))
                chunks, size = [], 0
    if chunks:
        yield ChunkBatch(b"".join(chunks), tuple(map(len, chunks)))
