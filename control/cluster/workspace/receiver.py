"""`WorkspaceReceiver`: the actor that receives a workspace on one host and passes it on to the hosts below it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import socket
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from hashlib import blake2b
from types import ModuleType
from typing import TYPE_CHECKING, Any

from skipper.control.api.actor import Actor, endpoint
from skipper.control.cluster.workspace.folder_sync import FolderSync, open_sync
from skipper.control.cluster.workspace.manifest import OURS, FolderManifest
from skipper.control.model.errors import WorkspaceError
from skipper.control.model.future import Future
from skipper.control.runtime.join_file import this_network

if TYPE_CHECKING:
    from skipper.control.api.views import ActorMesh

_TAKE_TIMEOUT_S = 600.0
"""How long one batch may take to reach the last host below."""


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """Some chunks, sent together.

    Attributes:
        data: their bytes, one chunk after another.
        sizes: how many bytes belong to each chunk.
    """

    data: bytes
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Subtree:
    """A receiver and the receivers below it, to which it forwards what it gets."""

    receiver: ActorMesh[Any]
    below: tuple[Subtree, ...]


def token_name(token: str) -> str:
    """The name of the file that identifies a folder. It does not reveal the content of the file."""
    return f"{OURS}token-{blake2b(token.encode(), digest_size=8).hexdigest()}"


def token_is_in(target: str, token: str) -> bool:
    """Whether a folder is the one into which the script has put the token.

    The name of the file is not a proof: other users can see it, and put such a file into one of their folders.
    """
    try:
        fd = os.open(os.path.join(target, token_name(token)), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(fd, "rb") as file:
        return stat.S_ISREG(os.fstat(fd).st_mode) and file.read(2 * len(token)) == token.encode()


class WorkspaceReceiver(Actor):
    """There is one in each process; one per host receives the folder."""

    def __init__(self) -> None:
        self._sync: FolderSync | None = None

    @endpoint
    def host(self) -> tuple[str, str]:
        """A unique id of this host, and its name for people."""
        return this_network(), socket.gethostname()

    @endpoint
    def begin(self, target: str, token: str, manifest: FolderManifest) -> set[bytes] | None:
        """Find out what is here already.

        Args:
            target: the folder.
            token: the content of a file in the script's folder; `token_name` makes its name.
            manifest: the content for the folder.

        Returns:
            The missing chunks; None if the target is the script's folder itself, or that of another host, on a shared
            file system.
        """
        self._close()
        if token_is_in(target, token):
            return None
        self._sync = open_sync(target, manifest, token)
        return None if self._sync is None else self._sync.missing

    @endpoint
    def take(self, batch: ChunkBatch, below: tuple[Subtree, ...]) -> int:
        """Keep chunks that are missing here, and forward all of them.

        Returns:
            How many bytes have been moved, here and below.
        """
        if any(type(size) is not int or size <= 0 for size in batch.sizes) or sum(batch.sizes) != len(batch.data):
            raise WorkspaceError("a received batch does not hold the chunks that it names")
        passed: list[Future[int]] = [branch.receiver.take.call_one(batch, branch.below) for branch in below]
        moved, offset, view = 0, 0, memoryview(batch.data)
        chunks = []
        for size in batch.sizes:
            chunks.append(view[offset : offset + size])
            offset += size
        if self._sync is not None:
            moved = self._sync.add(chunks)
        return moved + sum(future.get(_TAKE_TIMEOUT_S) for future in passed)

    @endpoint
    def commit(self) -> tuple[str, ...]:
        """Give the folder the content of the manifest. Returns the files that have changed."""
        if self._sync is None:
            return ()
        try:
            return self._sync.commit()
        finally:
            self._close()

    @endpoint
    def reload(self, target: str, changed: tuple[str, ...]) -> list[str]:
        """Reload the modules whose files have changed.

        Returns:
            Their names.
        """
        return reload_modules({os.path.realpath(os.path.join(target, path)) for path in changed})

    def __cleanup__(self, error: Exception | None) -> None:
        """End a sync that was not committed."""
        self._close()

    def _close(self) -> None:
        if self._sync is not None:
            self._sync.close()
            self._sync = None


def reload_modules(files: set[str]) -> list[str]:
    """Reload modules from some of these files, given as real paths, each after the modules that it imports.

    Returns:
        Their names, in that order.
    """
    importlib.invalidate_caches()
    loaded = {
        name: module
        for name, module in sys.modules.copy().items()
        if name != "__main__" and os.path.realpath(getattr(module, "__file__", None) or "/") in files
    }
    graph = {name: loaded.keys() & set(_imports(module)) - {name} for name, module in loaded.items()}
    try:
        names = list(TopologicalSorter(graph).static_order())
    except CycleError:  # modules import each other: there is no order in which all see the new ones
        names = list(loaded)
    for name in names:
        importlib.reload(loaded[name])
    return names


def _imports(module: ModuleType) -> Iterator[str]:
    """What its file imports now, by absolute names; for ``from a import b`` both ``a`` and ``a.b``."""
    package = module.__name__ if hasattr(module, "__path__") else module.__name__.rpartition(".")[0]
    with open(str(module.__file__), "rb") as file:
        tree = ast.parse(file.read())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
