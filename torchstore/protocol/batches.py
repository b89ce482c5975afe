"""The messages that put or read many plain values at once: columns instead of a record for each value.

The tensors of a batch are in one arena, a section for each. The rest of their description is dtypes and shapes, of
which there are few: manifests are listed once, and every value has the index of its own.
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
        keys: Of the values.
        kinds: For each, which of the manifests is its own.
        offsets: For each, where its section of the arena begins; equal ones are tied values, which lie there once.
        sizes: For each, the bytes of the section.
    """

    keys: tuple[str, ...]
    kinds: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def encode(self) -> bytes:
        """As bytes for `decode`."""
        return pickle.dumps((self.keys, self.kinds, self.offsets, self.sizes), protocol=5)

    @staticmethod
    def decode(encoded: bytes) -> Columns:
        """Undo the encoding. Only for bytes from this job, which control has authenticated."""
        return Columns(*pickle.loads(encoded))


@dataclass(frozen=True, slots=True)
class BatchPublication:
    """The next versions of many plain values of one publisher: all of them become visible in one step.

    Attributes:
        binding: The arena in which the tensors lie, or only its id where the controller is known to have it; None
            where there are none.
        manifests: Of the tensors: for each dtype and shape one.
        columns: The tensors, as `Columns.encode` makes it; no bytes where there are none.
        inline: Whole values as `values.inline_tensor` makes them, by key.
    """

    writer: ProcessId
    binding: Binding | str | None = None
    manifests: tuple[Manifest, ...] = ()
    columns: bytes = b""
    inline: Mapping[str, bytes] | None = None

    @property
    def manifest(self) -> None:
        """There is none for the batch as a whole."""
        return

    @property
    def copies(self) -> tuple[Binding, ...]:
        """There are none: values that are kept twice have arenas of their own."""
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
        versions: Of each key, in the order in which they were asked for.
        inline: Values that travel in the message, by their position.
        arenas: In which plain tensors lie.
        manifests: Of these: for each dtype and shape one.
        placed: Of the plain tensors: position, index of the arena, index of the manifest, offset and bytes of the
            section, or -1 for an arena that is one value's alone.
        others: Grants of what is more than a plain tensor, by their position.
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
