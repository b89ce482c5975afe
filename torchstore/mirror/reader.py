"""The reader's side of a mirror: a version, verified, into the tensors of another job."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch

from skipper.control.model.bounds import check_seconds
from skipper.torchstore.algebra.layout import Box, Piece, minus, plus
from skipper.torchstore.clients.registry import DEFAULT_STORE_NAME
from skipper.torchstore.clients.requests import VersionSelector, selector_of
from skipper.torchstore.errors import (
    DTypeMismatchError,
    KeyNotFoundError,
    LayoutMismatchError,
    MirrorDamagedError,
    MirrorRolledBackError,
    StateDictMismatchError,
    StoreTimeoutError,
    VersionNotFoundError,
)
from skipper.torchstore.mirror.cache import ChunkCache
from skipper.torchstore.mirror.files import MirrorFiles
from skipper.torchstore.mirror.manifest import MirroredTensor, MirrorManifest
from skipper.torchstore.mirror.publisher import DEFAULT_MIRROR_TIMEOUT_S, read_latest, read_manifest
from skipper.torchstore.mirror.signatures import Verifier
from skipper.torchstore.protocol.messages import Selector
from skipper.torchstore.support.coroutines import public
from skipper.torchstore.tensors.cells import region
from skipper.torchstore.tensors.landing import Landing, land, lands
from skipper.torchstore.tensors.local_tensors import LocalTensor, check_writable, describe, fingerprint
from skipper.torchstore.tensors.overlap import check_distinct
from skipper.torchstore.tensors.state_dict import flatten, unflatten
from skipper.torchstore.tensors.values import as_bytes, dtype_named, new_tensor
from skipper.torchstore.tensors.written import writing_mode, written
from skipper.torchstore.weights import put_state_dict


@dataclass(frozen=True, slots=True)
class MirrorRead:
    """The costs of a read.

    Attributes:
        version: Its number.
        fetched_nbytes: The bytes that were fetched from the mirror.
        chunks: The number of fetched chunks.
        skipped_chunks: The number of chunks that the reader needed and had already, in its tensors or in its folder.
    """

    version: int
    fetched_nbytes: int
    chunks: int
    skipped_chunks: int


class MirrorReader:
    """Reads versions that a `Mirror` has written.

    Signature and hashes are verified before a byte is used, and everything that a read needs has arrived before the
    first tensor is written: a failed read does not change the tensors. A rank fetches the chunks that its boxes touch.

    The example of `Mirror` shows one.

    Args:
        url: The URL of the publisher, or of a copy of its mirror.
        key: The key of the publisher.
        verifier: The publisher's `VerifyingKey`, or the `SharedSecret`.
        cache: A folder of this reader for what it has fetched. With it, a reader that was killed continues where it
            was, and knows which version it has seen. Without it, a read keeps what it fetches in memory.
        poll_s: How often it looks for a newer version, in seconds.
        at_least: Versions below this number are refused as rolled back.
        workers: How many files are read concurrently.
        options: Options of the file system: credentials, ``{"endpoint_url": ...}``.

    Attributes:
        last_read: What the last read has moved; None before the first.

    Raises:
        ValueError: An argument is out of its range, or fsspec has no such file system.
        ImportError: The package of that file system is not installed.
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        verifier: Verifier,
        cache: str | os.PathLike[str] | None = None,
        poll_s: float = 1.0,
        at_least: int = 0,
        workers: int = 16,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if workers < 1 or check_seconds("poll_s", poll_s) <= 0:
            raise ValueError("a reader needs at least one worker, and poll_s above 0")
        self._files = MirrorFiles(url, key, workers=workers, options=options)
        self._key = key
        self._verifier = verifier
        self._cache = ChunkCache(Path(cache) if cache is not None else None)
        self._poll_s = poll_s
        self._least = at_least
        self._seen = self._cache.newest_seen
        self._held: _Held | None = None
        self._relayed: dict[Any, Any] | None = None
        self.last_read: MirrorRead | None = None

    @public
    async def latest(self, *, timeout: float = DEFAULT_MIRROR_TIMEOUT_S) -> int:
        """The number of the newest version.

        Raises:
            KeyNotFoundError: There is none.
            MirrorError: As for `get_state_dict`.
            StoreTimeoutError: The file system did not answer in time.
        """
        number, _ = await self._latest(self._end(timeout))
        if number < 0:
            raise KeyNotFoundError(self._key, f"{self._files.latest}: there is no version of {self._key!r}")
        return number

    @public
    async def get_state_dict(
        self,
        user_state_dict: Mapping[Any, Any] | None = None,
        *,
        version: VersionSelector = "latest",
        strict: bool = True,
        delta: bool = False,
        timeout: float = DEFAULT_MIRROR_TIMEOUT_S,
    ) -> dict[Any, Any]:
        """Read one version, into the tensors of ``user_state_dict`` if there are any.

        Args:
            user_state_dict: Its tensors are filled in place; DTensors get their own shard. None: new, whole tensors.
            version: "latest", a number, or ("newer_than", number), which looks again every ``poll_s``.
            strict: Raise if the names of the two sides differ. Otherwise everything that is there is read.
            delta: You promise that nothing has written to these tensors since your last such read: then only chunks
                that have changed are fetched. In any doubt (other tensors, another grid of chunks) all are fetched.
            timeout: In seconds, including the wait for a version.

        Returns:
            The state dict, nested as it was put, with the given tensors.

        Raises:
            KeyNotFoundError, VersionNotFoundError: There is no such version, or no longer.
            StoreTimeoutError: No newer version arrived in time, or the file system did not answer.
            MirrorSignatureError: A file was not signed by the publisher.
            MirrorFormatError: A signed file is not what this release writes.
            MirrorRolledBackError: The mirror has older files than before.
            MirrorDamagedError: A chunk is missing, truncated or altered.
            MirrorUnreachableError: The file system has failed.
            StateDictMismatchError, LayoutMismatchError, DTypeMismatchError, KindMismatchError: The two do not fit;
                found before a chunk is fetched.
        """
        end, selector = self._end(timeout), selector_of(version)
        while True:
            manifest, oldest = await self._find(selector, end)
            try:
                return await self._read(manifest, user_state_dict, strict=strict, delta=delta, end=end)
            except MirrorDamagedError:
                _, oldest = await self._latest(end)
                if manifest.number >= oldest:
                    raise
                if selector.exact is not None:
                    raise VersionNotFoundError(self._key, manifest.number, ()) from None
                # The publisher has removed it meanwhile: there is a newer one.

    async def follow(
        self,
        user_state_dict: Mapping[Any, Any],
        *,
        after: int = -1,
        strict: bool = True,
        timeout: float = DEFAULT_MIRROR_TIMEOUT_S,
    ) -> AsyncIterator[int]:
        """Fill tensors with each newer version as it comes, reading only what has changed; yields the numbers.

        Do not change the tensors while it runs (the promise of ``delta=True``). Versions that come faster than they can
        be read are skipped. ``timeout`` is for each version, including the wait for it.

        Raises:
            StoreTimeoutError: No version arrived in time; call `follow` again to continue.
            StoreError: As for `get_state_dict`.
        """
        while True:
            await self.get_state_dict(
                user_state_dict, version=("newer_than", after), strict=strict, delta=True, timeout=timeout
            )
            assert self.last_read is not None  # by this read
            after = self.last_read.version
            yield after

    @public
    async def relay(
        self,
        key: str | None = None,
        *,
        after: int = -1,
        store_name: str = DEFAULT_STORE_NAME,
        timeout: float = DEFAULT_MIRROR_TIMEOUT_S,
    ) -> int:
        """Put the next newer version into this job's own store, under its number, for any number of readers.

        This process holds the whole state dict, and later calls update what has changed. Quantized tensors are put as
        they are stored, along with their scales.

        Args:
            key: The key to put it under; None: that of the mirror.
            after: The number of the last version.
            store_name: Name of the store.
            timeout: In seconds, including the wait for the version.

        Returns:
            The number.

        Raises:
            StoreError: As for `get_state_dict` and `put_state_dict`.
        """
        end = self._end(timeout)
        wanted: VersionSelector = ("newer_than", after)
        try:
            state = await self.get_state_dict(self._relayed, version=wanted, delta=True, timeout=timeout)
        except (StateDictMismatchError, LayoutMismatchError, DTypeMismatchError):  # a different model than before
            state = await self.get_state_dict(version=wanted, delta=True, timeout=self._left(end))
        self._relayed = state
        assert self.last_read is not None  # by this read
        number = self.last_read.version
        await put_state_dict(state, key or self._key, store_name, version=number, delta=True, timeout=self._left(end))
        return number

    def close(self) -> None:
        """End its threads; idempotent."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Steps ----------------------------------------------------------------------------------------------

    async def _latest(self, end: float) -> tuple[int, int]:
        """The newest version and the oldest kept one; -1 if there is none.

        Raises:
            MirrorRolledBackError: It is older than one that was seen.
        """
        found = await read_latest(self._files, self._verifier, self._key, end)
        number = found.number if found else -1
        if number < self._seen or (found and number < self._least):
            raise MirrorRolledBackError(self._files.latest, number, max(self._seen, self._least))
        if number > self._seen:
            self._seen = number
            await self._files.run(end, self._cache.remember, number)
        return number, found.oldest if found else -1

    async def _find(self, selector: Selector, end: float) -> tuple[MirrorManifest, int]:
        """The requested manifest.

        Raises:
            StoreTimeoutError: It did not appear in time.
        """
        while True:
            number, oldest = await self._latest(end)
            wanted = number if selector.exact is None else selector.exact
            if selector.newer_than is None and number < 0:
                raise KeyNotFoundError(self._key, f"{self._files.latest}: there is no version of {self._key!r}")
            if selector.newer_than is None or number > selector.newer_than:
                manifest = None
                if oldest <= wanted <= number:
                    manifest = await read_manifest(self._files, self._verifier, wanted, end)
                if manifest is not None:
                    if (manifest.key, manifest.number) != (self._key, wanted):
                        raise MirrorRolledBackError(self._files.version(wanted), manifest.number, wanted)
                    return manifest, oldest
                newest, oldest = await self._latest(end)
                if selector.exact is not None:
                    raise VersionNotFoundError(self._key, wanted, (newest,))
                if oldest <= wanted:  # it should exist
                    raise MirrorDamagedError(self._files.version(wanted), f"version {wanted} has no manifest")
                continue
            if end - asyncio.get_running_loop().time() <= self._poll_s:
                raise StoreTimeoutError(
                    f"{self._files.root}: no version of {self._key!r} newer than {selector.newer_than} arrived in time"
                )
            await asyncio.sleep(self._poll_s)

    async def _read(
        self, manifest: MirrorManifest, into: Mapping[Any, Any] | None, *, strict: bool, delta: bool, end: float
    ) -> dict[Any, Any]:
        """Fetch what a version needs, and then fill the tensors."""
        held = self._held if delta else None
        filling = _Filling.of(self._key, manifest, into, strict, held)
        needed = list(dict.fromkeys((part.digest, part.nbytes) for part in filling.parts))
        fetched = [nbytes for nbytes in await self._files.run_all(end, self._ensure, needed) if nbytes]
        if delta or (self._held is not None and self._held.mark == filling.mark):
            self._held = None  # until everything is written, the tensors hold no version
        await self._files.finish(filling.write, self._take)
        if delta:
            self._held = _Held(filling.mark, manifest, filling.landings, filling.targets)
        await self._files.run(end, self._cache.keep_only, manifest.digests())
        self.last_read = MirrorRead(
            manifest.number,
            sum(fetched),
            len(fetched),
            filling.unchanged + len(needed) - len(fetched),
        )
        return filling.state()

    def _ensure(self, chunk: tuple[str, int]) -> int:
        """Bring a verified chunk into the cache. Returns the bytes that were fetched for it. Runs in a thread."""
        digest, nbytes = chunk
        if self._cache.take(digest) is not None:
            return 0
        path = self._files.chunk(digest)
        data = self._files.read(path, nbytes)
        if data is None:
            raise MirrorDamagedError(path, "the chunk is missing")
        if len(data) != nbytes:
            raise MirrorDamagedError(
                path, f"the chunk has {'more' if len(data) > nbytes else len(data)} of {nbytes} bytes"
            )
        if hashlib.sha256(data).hexdigest() != digest:
            raise MirrorDamagedError(path, "the chunk holds other bytes than were published")
        self._cache.add(digest, data)
        return nbytes

    def _take(self, digest: str) -> bytes:
        """A chunk from the cache. Runs in a thread."""
        data = self._cache.take(digest)
        if data is None:
            raise MirrorDamagedError(self._files.chunk(digest), "it was removed from the folder of the cache")
        return data

    @staticmethod
    def _end(timeout: float) -> float:
        return asyncio.get_running_loop().time() + check_seconds("timeout", timeout)

    @staticmethod
    def _left(end: float) -> float:
        return max(end - asyncio.get_running_loop().time(), 0.05)


@dataclass(frozen=True, slots=True)
class _Held:
    """The content of a destination that was read with ``delta=True``.

    Attributes:
        mark: The fingerprint of the destination.
        landings: The received elements of tensors that were dequantized.
        targets: The filled tensors: they keep the memory, so that no other tensors can be there.
    """

    mark: tuple[Any, ...]
    manifest: MirrorManifest
    landings: Mapping[str, Landing]
    targets: Mapping[str, LocalTensor]

    def tensor(self, label: str, name: str, target: LocalTensor) -> MirroredTensor | None:
        """The content of a target; None: unknown."""
        known = self.targets.get(label)
        if known is None or known.tensor.data_ptr() != target.tensor.data_ptr():
            return None
        found = self.manifest.tensors.get(name)
        return found if found is not None and found.dtype == str(target.tensor.dtype) else None


@dataclass(frozen=True, slots=True)
class _ChunkPart:
    """The part of a chunk that goes into a tensor.

    Attributes:
        nbytes: The size of the whole chunk.
        label: The label of the target.
        box: The box of the chunk.
        common: The box that is taken from it.
        into: The destination of that box.
    """

    digest: str
    nbytes: int
    label: str
    box: Box
    common: Box
    into: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Filling:
    """A destination, and the chunks to fetch for it.

    Attributes:
        unchanged: The number of chunks that it needs and has already.
    """

    manifest: MirrorManifest
    mark: tuple[Any, ...]
    leaves: Mapping[str, Any]
    targets: Mapping[str, LocalTensor]
    landings: Mapping[str, Landing]
    parts: tuple[_ChunkPart, ...]
    unchanged: int

    @staticmethod
    def of(
        key: str, manifest: MirrorManifest, into: Mapping[Any, Any] | None, strict: bool, held: _Held | None
    ) -> _Filling:
        """Match a destination with a version.

        Raises:
            MismatchError: They do not fit together.
        """
        given = flatten(into)[0] if into is not None else {}
        items = {name: tensor.item() for name, tensor in manifest.tensors.items()}
        leaves = _leaves(key, manifest, given, strict=strict and into is not None)
        mark = (fingerprint(leaves),)
        targets = {name: describe(leaf, key=f"{key}/{name}") for name, leaf in leaves.items()}
        check_distinct(
            key, [(name, target.tensor) for name, target in targets.items()], lambda index: tuple(targets)[index]
        )
        if held is not None and held.mark != mark:
            held = None
        wanted, stored, landings = land(key, targets, {}, items, held.landings if held else MappingProxyType({}))
        parts: list[_ChunkPart] = []
        unchanged = 0
        for label, target in wanted.items():
            name = stored.get(label, label)
            tensor = manifest.tensors[name]
            _check(f"{key}/{name}", target, tensor)
            before = held.tensor(label, name, target) if held else None
            if before is not None and (before.chunk, before.shape) != (tensor.chunk, tensor.shape):
                before = None
            for index, part in _parts(label, target, tensor):
                if before is not None and before.digests[index] == part.digest:
                    unchanged += 1
                else:
                    parts.append(part)
        return _Filling(manifest, mark, leaves, wanted, landings, tuple(parts), unchanged)

    def write(self, take: Callable[[str], bytes]) -> None:
        """Write the chunks into the tensors. ``take`` returns the bytes of a chunk."""
        by_chunk: dict[str, list[_ChunkPart]] = {}
        for part in self.parts:
            by_chunk.setdefault(part.digest, []).append(part)
        touched = {part.label for part in self.parts}
        with written(self.leaves.values()):
            for digest, parts in by_chunk.items():
                data = bytearray(take(digest))
                for part in parts:
                    flat = torch.frombuffer(data, dtype=torch.uint8).view(part.into.dtype)
                    chunk = as_bytes(flat.reshape(part.box.shape))
                    with writing_mode(part.into):
                        as_bytes(part.into).copy_(
                            region(chunk, minus(part.common.offsets, part.box.offsets), part.common.shape)
                        )
            for label, landing in self.landings.items():
                beside = {label, *(f"{label} ({name})" for name in landing.beside())}
                if beside & touched:
                    landing.finish()

    def state(self) -> dict[Any, Any]:
        """The state dict, with the tensors in it."""
        values = {**self.leaves, **self.manifest.objects}
        return unflatten({name: values[name] for name in self.manifest.paths if name in values}, self.manifest.paths)


def _leaves(key: str, manifest: MirrorManifest, given: Mapping[str, Any], *, strict: bool) -> dict[str, torch.Tensor]:
    """The tensors to fill, by their names: the given ones, and new ones if none are given.

    Raises:
        StateDictMismatchError: The names differ.
    """
    own = {
        beside
        for name, tensor in manifest.tensors.items()
        if tensor.scaled is not None
        and isinstance(leaf := given.get(name), torch.Tensor)
        and lands(tensor.item(), leaf.dtype)
        for beside in tensor.scaled.beside()
    }
    names = [name for name in manifest.tensors if name not in own or name in given]
    if strict:
        missing = tuple(name for name in given if name not in manifest.tensors and name not in manifest.objects)
        unexpected = tuple(name for name in (*names, *manifest.objects) if name not in given)
        if missing or unexpected:
            raise StateDictMismatchError(key, missing, unexpected)
    leaves: dict[str, torch.Tensor] = {}
    for name in names:
        leaf = given.get(name)
        if isinstance(leaf, torch.Tensor):
            check_writable(leaf, f"{key}/{name}")
            leaves[name] = leaf
        else:
            leaves[name] = new_tensor(manifest.tensors[name].shape, manifest.tensors[name].dtype)
    return leaves


def _check(key: str, target: LocalTensor, tensor: MirroredTensor) -> None:
    if str(target.tensor.dtype) != tensor.dtype:
        raise DTypeMismatchError(key, f"mirrored as {tensor.dtype}, requested as {target.tensor.dtype}")
    if target.global_shape != tensor.shape:
        raise LayoutMismatchError(key, f"mirrored with shape {tensor.shape}, requested with {target.global_shape}")


def _parts(label: str, target: LocalTensor, tensor: MirroredTensor) -> Iterator[tuple[int, _ChunkPart]]:
    """The part of each chunk that goes into a target, with the chunk's number."""
    itemsize = dtype_named(tensor.dtype).itemsize
    for piece in target.pieces:
        for index, box in tensor.grid(piece.box):
            common = box.intersect(piece.box)
            assert common is not None, "the grid gives chunks that share an element"
            into = region(target.tensor, _local(piece, common), common.shape)
            yield index, _ChunkPart(tensor.digests[index], box.numel * itemsize, label, box, common, into)


def _local(piece: Piece, common: Box) -> tuple[int, ...]:
    return plus(piece.local, minus(common.offsets, piece.box.offsets))
