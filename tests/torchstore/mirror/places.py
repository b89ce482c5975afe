"""A mirror in a folder, and what may happen to its files."""

from pathlib import Path
from typing import Any

from skipper.torchstore.mirror import Mirror, MirrorReader, SharedSecret

SECRET = SharedSecret(b"0123456789abcdef0123456789abcdef")


def mirror_at(folder: Path | str, **options: Any) -> Mirror:
    return Mirror(str(folder), "policy", **{"signer": SECRET, "chunk_nbytes": 4096, **options})


def reader_at(folder: Path | str, **options: Any) -> MirrorReader:
    return MirrorReader(str(folder), "policy", **{"verifier": SECRET, "poll_s": 0.02, **options})


def files_of(folder: Path) -> dict[str, bytes]:
    """All files, by their paths in the mirror."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def chunks_of(folder: Path) -> list[Path]:
    return sorted((folder / "policy" / "chunks").glob("*/*"))
