"""A certificate: the digests of all tiles of a version, and one root over them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from os import PathLike
from pathlib import Path

from skipper.torchstore.algebra.layout import Box, Ints
from skipper.torchstore.errors import NotCertifiedError, ReplicaMismatchError, ShareMismatchError
from skipper.torchstore.proofs import certificate_lines
from skipper.torchstore.proofs.certified_tensor import CertifiedTensor
from skipper.torchstore.tensors.tiles import TensorsTiles, TensorTiles, TileKey, TileTable
from skipper.torchstore.tensors.values import dtype_named


@dataclass(frozen=True)
class Certificate:
    """Hashes of the exact bits of one version of a state dict, in any sharding; made by `torchstore.certificate`.

    Two versions of the same tensors in the same forms have the same root. The key and the number of the version are
    not in it, nor are entries that are not tensors.

    Attributes:
        key: The key of the version.
        version: Its number.
        tensors: The certified tensors, by name and form: "" as it is stored, or the dtype to which it is converted.

    Example:
        ```python
        import torch

        from skipper import torchstore
        from skipper.torchstore import sync as ts

        ts.initialize()
        model = torch.nn.Linear(4, 4)
        ts.put_state_dict(model.state_dict(), "policy", certify=True)
        certificate = ts.certificate("policy")
        proof: torchstore.Proof = torchstore.prove(model.state_dict(), certificate)  # ProofError if a bit differs
        print(proof.covered)  # 1.0
        ts.shutdown()
        ```
    """

    key: str
    version: int
    tensors: Mapping[TileKey, CertifiedTensor]

    @cached_property
    def root(self) -> str:
        """The hash over all tensors, in hexadecimal digits: over name, form, dtype, shape and tiles of each."""
        version = hashlib.sha256(b"skipper version\0")
        for (name, form), tensor in sorted(self.tensors.items()):
            version.update(tensor.root(name, form))
        return version.hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors as they are stored."""
        return sum(
            prod(tensor.shape) * dtype_named(tensor.dtype).itemsize
            for (_, form), tensor in self.tensors.items()
            if not form
        )

    def accepts(self, tag: object, *, covered: float = 0.0) -> bool:
        """Whether an object with this tag was made with weights that were proved to be these.

        A tag is a statement, not a signature: a process that can forge a sample can also forge its tag.

        Args:
            tag: What `Proof.tag` has returned, also after it was written and read as JSON; anything else is not
                accepted.
            covered: The smallest part of the version that has to be proved, between 0 and 1.
        """
        if not isinstance(tag, Mapping):
            return False
        mine = (self.key, self.version, self.root)
        share = tag.get("covered")
        if isinstance(share, bool) or not isinstance(share, int | float):
            return False
        return (tag.get("key"), tag.get("version"), tag.get("root")) == mine and share > 0 and share >= covered

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as a text file, one JSON object per line; equal certificates have equal files.

        Raises:
            OSError: It cannot be written.
        """
        text = certificate_lines.write(self.key, self.version, self.root, self.tensors)
        Path(path).write_text(text, encoding="utf-8")

    @staticmethod
    def load(path: str | PathLike[str]) -> Certificate:
        """Read what `save` has written. The root is computed again, and compared with the one in the file.

        Raises:
            CertificateFormatError: It is something else.
            OSError: It cannot be read.
        """
        return Certificate.decode(Path(path).read_bytes(), str(path))

    @staticmethod
    def decode(data: bytes, path: str) -> Certificate:
        """The certificate in the bytes of a file; ``path`` is for messages.

        Raises:
            CertificateFormatError: It is not a certificate.
        """
        key, version, root, tensors = certificate_lines.read(data, path)
        found = Certificate(key, version, tensors)
        if found.root != root:
            raise certificate_lines.wrong_root(path, root, found.root)
        return found


def certify(key: str, version: int, shares: Mapping[int, TensorsTiles]) -> Certificate:
    """Merge the tiles that the publishers of a version have certified, by their ranks.

    Raises:
        ReplicaMismatchError: Two of them hold different bytes of one tile.
        ShareMismatchError: They have not certified the same forms.
        NotCertifiedError: No publisher has certified one of the tiles.
    """
    tensors: dict[TileKey, CertifiedTensor] = {}
    for at in dict.fromkeys(at for tiles in shares.values() for at in tiles):
        of_ranks = {rank: tiles[at] for rank, tiles in shares.items() if at in tiles}
        first = next(iter(of_ranks.values()))
        table = TileTable(first.shape)
        for box in _joined(table, list(of_ranks.values())):
            raise ReplicaMismatchError(key, at[0], (box.offsets, box.shape), _holders(of_ranks, box))
        for box in table.missing():
            _refuse_hole(key, version, at, box, shares)
        tensors[at] = CertifiedTensor(
            first.dtype.removeprefix("torch."), first.shape, table.digests, first.is_quantized
        )
    return Certificate(key, version, dict(sorted(tensors.items())))


def _joined(table: TileTable, shares: Sequence[TensorTiles]) -> Iterator[Box]:
    for tiles in shares:
        yield from table.show(tiles.blocks, tiles.fragments)
    yield from table.join()


def _holders(of_ranks: Mapping[int, TensorTiles], box: Box) -> tuple[int, int]:
    """Two of the ranks that hold a part of a tile."""
    ranks = [
        rank
        for rank, tiles in of_ranks.items()
        if any(box.intersect(held) for held in (*(b.box for b in tiles.blocks), *(f.box for f in tiles.fragments)))
    ]
    return ranks[0], ranks[-1]


def _refuse_hole(key: str, version: int, at: TileKey, box: Box, shares: Mapping[int, TensorsTiles]) -> None:
    name, form = at
    if form and any((name, "") in tiles and at not in tiles for tiles in shares.values()):
        raise ShareMismatchError(f"{key}/{name}", f"not all ranks that hold it have certified it in {form}")
    raise NotCertifiedError(key, version, f"{name}{describe_box(box.offsets, box.shape)} was not checked")


def describe_box(offsets: Ints, shape: Ints) -> str:
    """A box of a tensor, as a slice."""
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in zip(offsets, shape, strict=True)) + "]"
