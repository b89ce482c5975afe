"""The parts of a version in a mirror: for each tensor a grid of chunks, named by the SHA-256 of their bytes.

Chunks are cut in global coordinates, independently of shards. A rank of a reader takes those that its boxes touch, and
a chunk whose name is in the previous version has not changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from skipper.torchstore.algebra.layout import Box, Ints
from skipper.torchstore.algebra.manifest import BlockScaled, Path, TensorItem
from skipper.torchstore.errors import DTypeMismatchError, KindMismatchError, MirrorFormatError
from skipper.torchstore.mirror.files import MOST_VERSION
from skipper.torchstore.tensors.landing import is_known_format
from skipper.torchstore.tensors.state_dict import path_of, steps_of, unflatten
from skipper.torchstore.tensors.values import dtype_named

MOST_CHUNK_NBYTES = 1 << 30
MOST_MANIFEST_NBYTES = 256 << 20  # some three million chunks

_FORMAT = "skipper.mirror"
_LONGEST = 1 << 62  # of a tensor, in elements: the limit of torch
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_DIMS = 64  # of torch


@dataclass(frozen=True, slots=True)
class MirroredTensor:
    """One tensor of a version.

    Attributes:
        dtype: The dtype of the stored elements, as torch prints it.
        shape: The shape of the whole tensor, in stored elements.
        chunk: The shape of its chunks; those at the end of a dim may be shorter.
        digests: SHA-256 of each chunk's bytes in row-major order, the chunks in row-major order too.
        scaled: How its values are stored, if it is quantized.
    """

    dtype: str
    shape: Ints
    chunk: Ints
    digests: tuple[str, ...]
    scaled: BlockScaled | None = None

    def item(self) -> TensorItem:
        """The tensor in the store's own terms, without memory."""
        return TensorItem(self.dtype, self.shape, (), 0, 0, (), dtype_named(self.dtype).itemsize, scaled=self.scaled)

    def chunks(self, within: Box | None = None) -> Iterator[tuple[str, Box]]:
        """The chunks that intersect a box (None: all), each with its own box."""
        for index, box in self.grid(within or Box.whole(self.shape)):
            yield self.digests[index], box

    def grid(self, within: Box) -> Iterator[tuple[int, Box]]:
        """The numbers and boxes of the chunks that intersect a box."""
        if within.numel == 0:
            return
        counts = grid_of(self.shape, self.chunk)
        touched = [
            range(start // step, (start + size - 1) // step + 1)
            for start, size, step in zip(within.offsets, within.shape, self.chunk, strict=True)
        ]
        for place in product(*touched):
            index = 0
            for at, count in zip(place, counts, strict=True):
                index = index * count + at
            yield index, chunk_box(place, self.shape, self.chunk)


@dataclass(frozen=True, slots=True)
class MirrorManifest:
    """One version of one key.

    Attributes:
        key: The key of the state dict.
        number: The number of the version.
        tensors: The tensors by name.
        objects: The entries that are not tensors, as JSON represents them.
        paths: How names lead back into the nested dict.
    """

    key: str
    number: int
    tensors: Mapping[str, MirroredTensor]
    objects: Mapping[str, Any]
    paths: Mapping[str, Path]

    def digests(self) -> set[str]:
        """All chunks that it needs."""
        return {digest for tensor in self.tensors.values() for digest in tensor.digests}

    def encode(self) -> bytes:
        """The bytes that are signed and written.

        Raises:
            KindMismatchError: An entry is neither a tensor nor a JSON value: a mirror contains no pickles.
        """
        objects = {}
        for name, value in self.objects.items():
            if not _is_json(value):
                raise KindMismatchError(
                    f"{self.key}/{name}",
                    f"a mirror contains only tensors and JSON values, not a {type(value).__name__}: jobs do not open "
                    "pickles of each other",
                )
            objects[name] = {"value": value, "path": list(steps_of(self.paths[name]))}
        tensors = {}
        for name, tensor in self.tensors.items():
            line: dict[str, Any] = {
                "dtype": tensor.dtype.removeprefix("torch."),
                "shape": list(tensor.shape),
                "chunk": list(tensor.chunk),
                "path": list(steps_of(self.paths[name])),
                "sha256": list(tensor.digests),
            }
            if (scaled := tensor.scaled) is not None:
                line["scaled"] = [scaled.format, list(scaled.block), scaled.packed, scaled.scales, scaled.tensor_scale]
            tensors[name] = line
        whole = {"format": _FORMAT, "key": self.key, "version": self.number, "tensors": tensors, "objects": objects}
        return json.dumps(whole, separators=(",", ":"), allow_nan=False).encode()

    @staticmethod
    def decode(body: bytes, path: str) -> MirrorManifest:
        """Undo the encoding; only for signed bytes.

        Raises:
            MirrorFormatError: It is not a manifest of this release; the message says where.
        """
        whole = _object(_json(body, path), path, "the manifest")
        if whole.get("format") != _FORMAT:
            raise MirrorFormatError(path, f"its format is {whole.get('format')!r:.80}, not {_FORMAT!r}")
        paths: dict[str, Path] = {}
        tensors = {
            name: _tensor(name, _object(line, path, name), paths, path)
            for name, line in _object(whole.get("tensors"), path, "tensors").items()
        }
        objects: dict[str, Any] = {}
        for name, line in _object(whole.get("objects"), path, "objects").items():
            entry = _object(line, path, name)
            if name in tensors or not _is_json(entry.get("value", ...)):
                raise MirrorFormatError(path, f"{name!r:.80} appears twice, or has a value that JSON does not know")
            objects[name], paths[name] = entry["value"], _path(entry.get("path"), path, name)
        for name, tensor in tensors.items():
            for beside in tensor.scaled.beside() if tensor.scaled else ():
                if beside not in tensors:
                    raise MirrorFormatError(path, f"{name!r:.80} has no scales")
        key, number = whole.get("key"), whole.get("version")
        if not isinstance(key, str):
            raise MirrorFormatError(path, "it names no key")
        manifest = MirrorManifest(key, _number(number, path), tensors, objects, paths)
        try:
            unflatten(dict.fromkeys(paths), paths)
        except (TypeError, KeyError) as error:
            raise MirrorFormatError(path, f"its paths contradict each other: {error}") from error
        return manifest


@dataclass(frozen=True, slots=True)
class LatestVersion:
    """The newest version, and the oldest one that is kept."""

    number: int
    oldest: int

    def encode(self, key: str) -> bytes:
        """The bytes that are signed and written."""
        return json.dumps({"key": key, "version": self.number, "oldest": self.oldest}).encode()

    @staticmethod
    def decode(body: bytes, key: str, path: str) -> LatestVersion:
        """Undo the encoding; only for signed bytes.

        Raises:
            MirrorFormatError: It is something else, or about another key.
        """
        whole = _object(_json(body, path), path, "it")
        if whole.get("key") != key:
            raise MirrorFormatError(path, f"it is about the key {whole.get('key')!r:.80}, not {key!r}")
        return LatestVersion(_number(whole.get("version"), path), _number(whole.get("oldest"), path))


def chunk_shape(shape: Ints, itemsize: int, nbytes: int) -> Ints:
    """The shape of chunks of limited size: the longest dim is halved until they are small enough.

    Halving aligns chunks with shards, which are mostly repeated halves, too.
    """
    chunk = [max(size, 1) for size in shape]
    while prod(chunk) * itemsize > nbytes and max(chunk) > 1:
        longest = chunk.index(max(chunk))
        chunk[longest] = -(-chunk[longest] // 2)
    return tuple(chunk)


def grid_of(shape: Ints, chunk: Ints) -> Ints:
    """The number of chunks along each dim."""
    return tuple(-(-size // step) for size, step in zip(shape, chunk, strict=True))


def chunk_box(place: Ints, shape: Ints, chunk: Ints) -> Box:
    """The box of the chunk at a position of the grid."""
    offsets = tuple(at * step for at, step in zip(place, chunk, strict=True))
    sizes = (min(step, size - start) for start, step, size in zip(offsets, chunk, shape, strict=True))
    return Box(offsets, tuple(sizes))


def _json(body: bytes, path: str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MirrorFormatError(path, f"it is not JSON: {error}") from None


def _is_json(value: Any, depth: int = 0) -> bool:
    """Whether a value is unchanged after encoding and decoding as JSON."""
    if depth > _MOST_DIMS:
        return False
    if isinstance(value, dict):
        return all(type(name) is str and _is_json(each, depth + 1) for name, each in value.items())
    if type(value) is list:
        return all(_is_json(each, depth + 1) for each in value)
    if type(value) is float:
        return value == value and abs(value) != float("inf")
    return value is None or type(value) in (str, bool, int)


def _object(value: Any, path: str, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MirrorFormatError(path, f"{what:.80} is not a JSON object")
    return value


def _number(value: Any, path: str) -> int:
    if type(value) is not int or not 0 <= value <= MOST_VERSION:
        raise MirrorFormatError(path, f"{value!r:.80} is not a number of a version")
    return value


def _ints(value: Any, least: int, path: str, name: str) -> Ints:
    if (
        not isinstance(value, list)
        or len(value) > _MOST_DIMS
        or any(type(each) is not int or not least <= each <= _LONGEST for each in value)
    ):
        raise MirrorFormatError(path, f"{name!r:.80} has no shape")
    return tuple(value)


def _path(value: Any, path: str, name: str) -> Path:
    if not isinstance(value, list) or not value or any(type(step) not in (str, int) for step in value):
        raise MirrorFormatError(path, f"{name!r:.80} has no path")
    return path_of(value)


def _tensor(name: str, line: dict[str, Any], paths: dict[str, Path], path: str) -> MirroredTensor:
    dtype = line.get("dtype")
    try:
        if not isinstance(dtype, str) or dtype.startswith("q"):  # quantized by torch: no dense memory
            raise DTypeMismatchError("", "no dtype")
        itemsize = dtype_named(f"torch.{dtype}").itemsize
    except DTypeMismatchError:
        raise MirrorFormatError(path, f"{name!r:.80} has a dtype that this torch does not: {dtype!r:.80}") from None
    shape, chunk = _ints(line.get("shape"), 0, path, name), _ints(line.get("chunk"), 1, path, name)
    digests = line.get("sha256")
    if len(shape) != len(chunk) or prod(shape) > _LONGEST or prod(chunk) * itemsize > MOST_CHUNK_NBYTES:
        raise MirrorFormatError(path, f"{name!r:.80} has chunks that do not fit its shape, or are too large")
    if not isinstance(digests, list) or len(digests) != prod(grid_of(shape, chunk)):
        raise MirrorFormatError(path, f"{name!r:.80} has another number of chunks than its shape needs")
    if any(not isinstance(digest, str) or not _DIGEST.fullmatch(digest) for digest in digests):
        raise MirrorFormatError(path, f"{name!r:.80} has a chunk without a SHA-256")
    paths[name] = _path(line.get("path"), path, name)
    return MirroredTensor(f"torch.{dtype}", shape, chunk, tuple(digests), _scaled(line, shape, path, name))


def _scaled(line: dict[str, Any], shape: Ints, path: str, name: str) -> BlockScaled | None:
    found = line.get("scaled")
    if found is None:
        return None
    if not isinstance(found, list) or [type(each) for each in found] != [str, list, int, str, str]:
        raise MirrorFormatError(path, f"{name!r:.80} is quantized in an unknown format")
    kind, block, packed, scales, tensor_scale = found
    sizes = _ints(block, 1, path, name)
    if not is_known_format(kind) or len(sizes) != len(shape) or not 1 <= packed <= 8:
        raise MirrorFormatError(path, f"{name!r:.80} is quantized in blocks that do not fit it")
    return BlockScaled(kind, sizes, packed, scales, tensor_scale)
