"""The messages that put or read many plain values at once: with columns instead of a record for each value.

The tensors of a batch are in one arena, with a section for each. The rest of their description, dtypes and shapes, has
few different values: each manifest is listed once, and every tensor has the index of its manifest.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from skipper.torchstore.algebra.manifest import Binding, Manifest
from skipper.torchstore.protocol.messages import Grant
from skipper.torchstore.support.process import ProcessId


@dataclass(frozen=True, slots=True)
class Columns:
    """The tensors of a batch, by column.

    Attributes:
        keys: The keys of the values.
        kinds: For each, the index of its manifest.
        offsets: For each, the offset of its section in the arena; equal for tied values, which are stored once.
        sizes: For each, the size of its section in bytes.
    """

    keys: tuple[str, ...]
    kinds: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def encode(self) -> bytes:
        """The columns as bytes, for `decode`."""
        return pickle.dumps((self.keys, self.kinds, self.offsets, self.sizes), protocol=5)

    @staticmethod
    def decode(encoded: bytes) -> Columns:
        """Undo the encoding. Only for bytes from this job, which control has authenticated."""
        return Columns(*pickle.loads(encoded))


@dataclass(frozen=True, slots=True)
class BatchPublication:
    """The next versions of many plain values of one publisher: all of them become visible in one step.

    Attributes:
        binding: The arena with the tensors, or only its id if the controller has it already; None if there are no
            tensors.
        manifests: The manifests of the tensors: one for each dtype and shape.
        columns: The encoded `Columns` of the tensors; empty if there are none.
        inline: Whole values, encoded by `values.inline_tensor`, by key.
    """

    writer: ProcessId
    binding: Binding | str | None = None
    manifests: tuple[Manifest, ...] = ()
    columns: bytes = b""
    inline: Mapping[str, bytes] | None = None

    @property
    def manifest(self) -> None:
        """The batch as a whole has none."""
        return

    @property
    def copies(self) -> tuple[Binding, ...]:
        """None: values with copies have their own arenas."""
        return ()

    def brief(self, known: Iterable[str]) -> BatchPublication:
        """The publication with an id in place of an arena that the controller knows."""
        binding = self.binding
        if isinstance(binding, Binding) and binding.id in known:
            return replace(self, binding=binding.id)
        return self


@dataclass(frozen=True, slots=True)
class BatchGrant:
    """Permission to read many versions until the lease is returned; one lease for all.

    Attributes:
        lease: 0 if there is nothing to return.
        versions: The version of each key, in the order of the request.
        inline: Values that travel in the message, by their position.
        arenas: The arenas with the plain tensors.
        manifests: Their manifests: one for each dtype and shape.
        placed: For each plain tensor: position, index of the arena, index of the manifest, and offset and bytes of the
        section, or -1 for an arena with a single value.
        others: Grants of values that are not plain tensors, by their position.
        waited_s: How long the controller had to wait for the versions.
    """

    lease: int
    versions: tuple[int, ...]
    inline: dict[int, bytes]
    arenas: tuple[Binding, ...]
    manifests: tuple[Manifest, ...]
    placed: tuple[tuple[int, int, int, int, int], ...]
    others: dict[int, Grant]
    waited_s: float = 0.0
