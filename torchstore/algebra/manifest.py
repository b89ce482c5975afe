"""A publisher's description of a value for the store: the records that travel over control.

A *manifest* describes the content: names, dtypes, shapes, which boxes this publisher holds and where they are in its
buffers. It is the same in every step of a training run. A *binding* describes the memory: handles of registered
buffers. It is the same as long as the memory is (direct mode: always; snapshot mode: one per arena). A *publication*
combines both with a version, and with values that are small enough to travel in the message.

Manifests and bindings have ids and are sent once: a warm publication, and the answer to a warm reader, contain only
ids.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from skipper.dataplane import RemoteLayout
from skipper.torchstore.algebra.layout import Box, Ints, Piece

if TYPE_CHECKING:
    from skipper.dataplane import RDMABuffer

Mode = Literal["snapshot", "direct"]
Kind = Literal["value", "state_dict"]

Path = tuple[Any, ...]
"""Steps from the root of a state dict: a dict key, or a position in a list or tuple."""

Digests = Mapping[tuple[str, Ints, Ints], bytes]
"""Keyed by the name of a tensor, and the offsets and shape of a box in it."""

_SMALL_BYTES = 512  # of an encoded manifest of a plain value


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """How the values of a quantized tensor are stored.

    Attributes:
        format: The name of the format; see `tensors.quantization`.
        block: How many values share a scale, by dim.
        packed: The number of values in one stored element, along the last dim.
        scales: The name of the tensor that holds the scales of the blocks.
        tensor_scale: The name of the tensor that holds the scale of the whole tensor; "" if the format has none.
    """

    format: str
    block: Ints
    packed: int
    scales: str
    tensor_scale: str

    def beside(self) -> tuple[str, ...]:
        """The names of the tensors that belong to it."""
        return (self.scales, self.tensor_scale) if self.tensor_scale else (self.scales,)


@dataclass(frozen=True, slots=True)
class TensorItem:
    """One tensor of a manifest: the whole tensor, and the part that this publisher holds.

    Attributes:
        dtype: The dtype as torch prints it, "torch.bfloat16".
        global_shape: The shape of the whole tensor.
        pieces: The boxes in this publisher's local tensor; none for an empty shard.
        buffer: Index of the buffer (in the binding) that contains the local tensor.
        offset: Bytes from the start of that buffer to the local tensor's first element.
        strides: The strides of the local tensor, in bytes.
        itemsize: Bytes of one element.
        pickled: The bytes are not a tensor but an object too large to travel in a message.
        scaled: How its values are stored, if it is quantized; otherwise None.
    """

    dtype: str
    global_shape: Ints
    pieces: tuple[Piece, ...]
    buffer: int
    offset: int
    strides: Ints
    itemsize: int
    pickled: bool = False
    scaled: BlockScaled | None = None

    @property
    def value_shape(self) -> Ints:
        """The shape of the whole tensor in values: one element may hold several."""
        if self.scaled is None or self.scaled.packed == 1:
            return self.global_shape
        return (*self.global_shape[:-1], self.global_shape[-1] * self.scaled.packed)

    def value_box(self, box: Box) -> Box:
        """A box of stored elements, in values."""
        if self.scaled is None or self.scaled.packed == 1:
            return box
        packed = self.scaled.packed
        return Box((*box.offsets[:-1], box.offsets[-1] * packed), (*box.shape[:-1], box.shape[-1] * packed))

    def block_at(self, local: Ints, shape: Ints) -> RemoteLayout:
        """The place in its buffer of the block of the local tensor that begins at these indices."""
        start = self.offset + sum(index * stride for index, stride in zip(local, self.strides, strict=True))
        return RemoteLayout(offset=start, shape=shape, strides=self.strides, itemsize=self.itemsize)

    def piece_at(self, local: Ints) -> tuple[int, Piece]:
        """The piece of the local tensor that contains an element, and its number.

        Raises:
            LookupError: No piece contains it.
        """
        for number, piece in enumerate(self.pieces):
            if all(low <= at < low + size for low, at, size in zip(piece.local, local, piece.box.shape, strict=True)):
                return number, piece
        raise LookupError(f"no piece of the local tensor holds the element {local}")


@dataclass(frozen=True, slots=True)
class MeshPosition:
    """Which rank of which mesh a publication comes from; a publication of a single process has no axes.

    Attributes:
        sharded_axes: The axes along which ranks hold different elements: a version is complete when every coordinate
            along these has published. Along the other axes, ranks are replicas of each other.
    """

    coordinate: Ints = ()
    mesh_shape: Ints = ()
    sharded_axes: Ints = ()

    def shard(self) -> Ints:
        """The coordinate, without the axes along which ranks are replicas."""
        return tuple(self.coordinate[axis] for axis in self.sharded_axes)


WHOLE = MeshPosition()
"""The origin of everything that a process publishes alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """Everything about a value except its bytes.

    Attributes:
        id: A digest of the rest: equal manifests have equal ids.
        tensors: The tensors by name; a plain value (`put`) has the only name "".
        objects: The names of the entries that are not tensors.
        paths: How names lead back into the nested dict.
        sums: Buffer index and offset of the checksums of the tensors' cells; None if there are none.
        encoded: The manifest as it is sent. A process that forwards a manifest forwards these bytes.
    """

    id: str
    kind: Kind
    part: MeshPosition
    tensors: Mapping[str, TensorItem]
    objects: tuple[str, ...]
    paths: Mapping[str, Path]
    sums: tuple[int, int] | None
    encoded: bytes

    @staticmethod
    def of(
        kind: Kind,
        part: MeshPosition,
        tensors: Mapping[str, TensorItem],
        objects: tuple[str, ...],
        paths: Mapping[str, Path],
        sums: tuple[int, int] | None = None,
    ) -> Manifest:
        """Make a manifest, its encoding and its id."""
        # Plain tuples: the C pickler writes and reads them without a step in Python. Tensors of one layout share their
        # pieces, and so do the tuples that represent them: they are written once.
        shared: dict[int, _PlainPieces] = {}
        plain = [_plain(name, item, shared) for name, item in tensors.items()]
        place = (part.coordinate, part.mesh_shape, part.sharded_axes)
        encoded = pickle.dumps((kind, place, plain, objects, dict(paths), sums), protocol=5)
        return Manifest(_digest(encoded), kind, part, tensors, objects, paths, sums, encoded)

    @staticmethod
    def decode(encoded: bytes) -> Manifest:
        """Undo the encoding. Only for bytes from this job, which control has authenticated."""
        return _decode_small(encoded) if len(encoded) <= _SMALL_BYTES else Manifest._decode(encoded)

    @staticmethod
    def _decode(encoded: bytes) -> Manifest:
        kind, position, plain, objects, paths, sums = pickle.loads(encoded)
        shared: dict[int, tuple[Piece, ...]] = {}
        tensors = {
            name: TensorItem(
                dtype,
                shape,
                _pieces(pieces, shared),
                buffer,
                offset,
                strides,
                itemsize,
                pickled,
                BlockScaled(*scaled) if scaled else None,
            )
            for name, dtype, shape, pieces, (buffer, offset, strides, itemsize, pickled), scaled in plain
        }
        return Manifest(_digest(encoded), kind, MeshPosition(*position), tensors, objects, paths, sums, encoded)

    def __reduce__(self) -> tuple[Any, ...]:
        return Manifest.decode, (self.encoded,)

    def boxes(self, name: str) -> frozenset[Box]:
        """The boxes that this publisher holds of one tensor."""
        return frozenset(piece.box for piece in self.tensors[name].pieces)


@lru_cache(maxsize=4096)
def _decode_small(encoded: bytes) -> Manifest:
    """Decode a manifest; values of one dtype and shape have equal manifests, which are decoded, and kept, once."""
    return Manifest._decode(encoded)


_PlainPieces = tuple[tuple[Ints, Ints, Ints], ...]


def _digest(encoded: bytes) -> str:
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


def _plain(name: str, item: TensorItem, shared: dict[int, _PlainPieces]) -> tuple[Any, ...]:
    pieces = shared.get(id(item.pieces))
    if pieces is None:
        pieces = tuple((piece.box.offsets, piece.box.shape, piece.local) for piece in item.pieces)
        shared[id(item.pieces)] = pieces
    place = (item.buffer, item.offset, item.strides, item.itemsize, item.pickled)
    return name, sys.intern(item.dtype), item.global_shape, pieces, place, astuple(item.scaled) if item.scaled else ()


def _pieces(plain: _PlainPieces, shared: dict[int, tuple[Piece, ...]]) -> tuple[Piece, ...]:
    pieces = shared.get(id(plain))
    if pieces is None:
        pieces = shared[id(plain)] = tuple(Piece(Box(offsets, shape), local) for offsets, shape, local in plain)
    return pieces


class Binding:
    """The memory behind a manifest.

    Handles are pickled once, by the process that owns the memory, and unpickled by those that read it: the controller
    forwards their bytes.

    Attributes:
        id: A unique id; a restarted publisher or volume, and memory that moves, get a new one.
        mode: Who owns the memory: a volume (snapshot) or the publisher (direct).
        volume: The id of the volume in snapshot mode, "" in direct mode.
    """

    __slots__ = ("_memory", "_packed", "id", "mode", "volume")

    def __init__(
        self, name: str, mode: Mode, volume: str, buffers: tuple[RDMABuffer, ...], seal: RDMABuffer | None = None
    ) -> None:
        self.id = name
        self.mode: Mode = mode
        self.volume = volume
        self._memory: tuple[tuple[RDMABuffer, ...], RDMABuffer | None] | None = (buffers, seal)
        self._packed = b""

    @property
    def arena_id(self) -> str:
        """The id of what must be kept while any of it is used: this memory, or the arena that contains it."""
        return self.id

    @property
    def buffers(self) -> tuple[RDMABuffer, ...]:
        """Registered memory; a manifest's items refer to it by index."""
        return self._unpacked()[0]

    @property
    def seal(self) -> RDMABuffer | None:
        """Direct mode: one 8-byte word in the publisher's memory.

        It contains the published generation, or 0 while the publisher may be writing.
        """
        return self._unpacked()[1]

    def __reduce__(self) -> tuple[Any, ...]:
        self._packed = self._packed or pickle.dumps(self._memory, protocol=5)
        return Binding._arrived, (self.id, self.mode, self.volume, self._packed)

    @staticmethod
    def _arrived(name: str, mode: Mode, volume: str, packed: bytes) -> Binding:
        binding = Binding(name, mode, volume, ())
        binding._memory, binding._packed = None, packed
        return binding

    def _unpacked(self) -> tuple[tuple[RDMABuffer, ...], RDMABuffer | None]:
        if self._memory is None:
            self._memory = pickle.loads(self._packed)
        return self._memory
