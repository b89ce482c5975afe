"""A tensor in a certificate."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from skipper.torchstore.algebra.layout import Ints
from skipper.torchstore.tensors.tiles import TileTable, tile_shape


@dataclass(frozen=True, slots=True)
class CertifiedTensor:
    """One tensor of a certificate, in one form.

    Attributes:
        dtype: Its dtype in that form: "bfloat16".
        shape: The shape of the whole tensor.
        digests: The digests of its tiles, row by row, 32 bytes each.
        is_quantized: Whether it is stored as small floats whose values depend on separate scales.
    """

    dtype: str
    shape: Ints
    digests: bytes
    is_quantized: bool = False

    def root(self, name: str, form: str) -> bytes:
        """The hash over its properties and its tiles, in the order of their positions."""
        what = [name, form, self.dtype, list(self.shape), list(tile_shape(self.shape)), self.is_quantized]
        found = hashlib.sha256(b"skipper tensor\0" + json.dumps(what).encode() + b"\0")
        found.update(self.digests)
        return found.digest()

    def table(self) -> TileTable:
        """Its tiles, to compare others with them."""
        return TileTable(self.shape, self.digests)
