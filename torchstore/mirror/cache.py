"""A reader's fetched chunks: in memory until they are used, or in a folder, where they outlive the reader."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from skipper.torchstore.errors import MirrorUnreachableError

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SEEN = "newest-seen"


class ChunkCache:
    """Verified chunks by their SHA-256.

    Args:
        folder: A folder for one key and one reader; None: they are kept in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._held: dict[str, bytes] = {}
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def newest_seen(self) -> int:
        """The newest version that a reader with this folder has seen; -1 before, and without a folder."""
        if self._folder is None:
            return -1
        try:
            text = (self._folder / _SEEN).read_text("ascii", "replace")[:20]
        except OSError:
            return -1
        return int(text) if re.fullmatch(r"[0-9]{1,19}", text) else -1

    def remember(self, number: int) -> None:
        """Store the number of the newest version that was seen."""
        if self._folder is not None:
            self._write(self._folder / _SEEN, str(number).encode())

    def add(self, digest: str, data: bytes) -> None:
        """Keep a verified chunk."""
        if self._folder is None:
            self._held[digest] = data
        else:
            self._write(self._folder / digest, data)

    def take(self, digest: str) -> bytes | None:
        """A chunk; None if it is missing, or has changed since it was kept."""
        if self._folder is None:
            return self._held.get(digest)
        try:
            data = (self._folder / digest).read_bytes()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == digest else None

    def keep_only(self, digests: set[str]) -> None:
        """Drop all other chunks. In memory, all are dropped: the reader's tensors have the data."""
        self._held.clear()
        if self._folder is not None:
            for path in self._folder.iterdir():
                if path.name.startswith(".") or (_DIGEST.fullmatch(path.name) and path.name not in digests):
                    with suppress(OSError):
                        path.unlink()

    def _write(self, path: Path, data: bytes) -> None:
        beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            beside.write_bytes(data)
            os.replace(beside, path)
        except OSError as error:
            raise MirrorUnreachableError(str(path), f"{type(error).__name__}: {error}") from error
