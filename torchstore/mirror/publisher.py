"""The publisher's side of a mirror: from a version in this job's store to files, each written once."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from skipper.control.model.bounds import check_seconds
from skipper.torchstore.algebra.layout import Box
from skipper.torchstore.clients.local_client import LocalClient
from skipper.torchstore.clients.pinning import PinnedBlock, PinnedVersion
from skipper.torchstore.clients.registry import DEFAULT_STORE_NAME, run
from skipper.torchstore.clients.requests import VersionSelector
from skipper.torchstore.errors import VersionExistsError
from skipper.torchstore.mirror.files import MirrorFiles
from skipper.torchstore.mirror.manifest import (
    MOST_CHUNK_NBYTES,
    MOST_MANIFEST_NBYTES,
    LatestVersion,
    MirroredTensor,
    MirrorManifest,
    chunk_shape,
)
from skipper.torchstore.mirror.signatures import Signer, Verifier, seal, unseal
from skipper.torchstore.support.coroutines import public
from skipper.torchstore.tensors.values import new_tensor

DEFAULT_MIRROR_TIMEOUT_S = 600.0

_LATEST_NBYTES = 4096


class Mirror:
    """Writes versions of one key into a folder or an object store, for readers of other jobs.

    A version is written in this order: its chunks, its manifest, and ``latest.json``, which names it. Each of these
    files appears complete, so that a publisher may be killed at any point: readers then see the previous version, and
    the next `publish` finds the chunks that exist. Chunks that the previous version has are not written again. There is
    one publisher of a key at a time; a second one gets `VersionExistsError`.

    Args:
        url: The folder or bucket, as for fsspec: "s3://bucket/run7", "/shared/run7".
        key: The key of the state dict in this job's store; readers use it too.
        signer: A `SigningKey`, or a `SharedSecret`.
        keep: How many versions readers find. The chunks of older ones are removed, unless a kept one has them.
        chunk_nbytes: The maximum size of a chunk, which is compared, and fetched, as a whole.
        memory_nbytes: How much of a version is in this process' memory at a time.
        workers: How many files are written concurrently.
        options: Options of the file system: credentials, ``{"endpoint_url": ...}``.

    Raises:
        ValueError: An argument is out of its range, or fsspec has no such file system.
        ImportError: The package of that file system is not installed.

    Example:
        ```python
        import asyncio
        import tempfile

        import torch

        from skipper import torchstore as ts
        from skipper.torchstore.mirror import Mirror, MirrorReader, SigningKey, VerifyingKey

        async def main(url: str) -> None:  # "s3://bucket/run7", or a folder
            await ts.initialize()
            key = SigningKey.generate()
            public: VerifyingKey = key.verifying_key
            with Mirror(url, "policy", signer=key) as mirror:
                await ts.put_state_dict({"w": torch.ones(4)}, "policy")
                await mirror.publish()
            mine = {"w": torch.zeros(4)}
            with MirrorReader(url, "policy", verifier=public) as reader:  # in another job
                await reader.get_state_dict(mine)
            print(mine["w"].tolist())  # [1.0, 1.0, 1.0, 1.0]
            await ts.shutdown()

        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(main(folder))
        ```
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        signer: Signer,
        keep: int = 2,
        chunk_nbytes: int = 4 << 20,
        memory_nbytes: int = 256 << 20,
        workers: int = 16,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if keep < 1 or workers < 1:
            raise ValueError("a mirror keeps at least one version, and has at least one worker")
        if not 16 <= chunk_nbytes <= MOST_CHUNK_NBYTES or memory_nbytes < 1:
            raise ValueError(f"a chunk has 16 to {MOST_CHUNK_NBYTES:,} bytes, and some memory is needed")
        self._files = MirrorFiles(url, key, workers=workers, options=options)
        self._key = key
        self._signer = signer
        self._keep = keep
        self._chunk_nbytes = chunk_nbytes
        self._memory_nbytes = memory_nbytes

    @public
    async def publish(
        self,
        *,
        version: VersionSelector = "latest",
        store_name: str = DEFAULT_STORE_NAME,
        timeout: float = DEFAULT_MIRROR_TIMEOUT_S,
    ) -> int:
        """Mirror one version of the store, under its number there; chunks that exist are not written again.

        The store keeps the version until it is written. Quantized tensors are mirrored as they are stored.

        Returns:
            Its number.

        Raises:
            VersionExistsError: The mirror has another version of that number, or a newer one: another publisher writes
                to it, or the store of this job was initialized again.
            KindMismatchError: An entry is not a tensor and cannot be written as JSON.
            MirrorUnreachableError: The file system has failed. The next call finds what has been written.
            MirrorSignatureError, MirrorFormatError: The files in the mirror are not those of this key.
            StoreTimeoutError: It took too long. The next call finds what has been written.
            StoreError: As for `get_state_dict`.
        """
        end = asyncio.get_running_loop().time() + check_seconds("timeout", timeout)
        written: list[MirrorManifest] = []

        async def write(pinned: PinnedVersion) -> None:
            written.append(await self._write(pinned, end))

        number = await run(
            store_name, timeout, LocalClient.with_pinned, self._key, write, {}, version=version, timeout=timeout
        )
        await self._show(written[0], end)
        await self._remove_old(end)
        return number

    @public
    async def sweep(self, *, timeout: float = DEFAULT_MIRROR_TIMEOUT_S) -> int:
        """Remove the chunks without a version that killed publishers have left. Do not publish at the same time.

        Returns:
            How many files there were.

        Raises:
            MirrorError: As for `publish`.
            StoreTimeoutError: It took too long.
        """
        end = asyncio.get_running_loop().time() + check_seconds("timeout", timeout)
        needed: set[str] = set()
        for number in await self._files.run(end, self._files.versions):
            manifest = await self._manifest(number, end)
            needed |= manifest.digests() if manifest else set()
        left = await self._files.run(end, self._files.chunks) - needed
        await self._remove(left, end)
        unfinished = await self._files.run(end, self._files.unfinished)
        await self._files.run_all(end, self._files.remove, unfinished)
        return len(left) + len(unfinished)

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

    async def _write(self, pinned: PinnedVersion, end: float) -> MirrorManifest:
        """Write the chunks of a version, and then its manifest."""
        latest = await read_latest(self._files, self._signer, self._key, end)
        there = await self._files.run(end, self._files.versions)
        newest = max([*there, latest.number if latest else -1])
        if pinned.version < newest:
            raise VersionExistsError(self._key, pinned.version, newest)
        before = await self._manifest(there[-1], end) if there else None
        work = _Upload(self._files, pinned, before.digests() if before else set(), self._chunk_nbytes)
        objects = pinned.objects()
        paths = dict(pinned.paths())
        MirrorManifest(self._key, pinned.version, {}, objects, paths).encode()  # refuses what JSON cannot represent
        for batch in work.batches(self._memory_nbytes):
            await work.upload(batch, end)
        manifest = MirrorManifest(self._key, pinned.version, work.tensors(), objects, paths)
        body = manifest.encode()
        path = self._files.version(pinned.version)
        data = seal(self._signer, "version", body)
        if not await self._files.run(end, self._files.create, path, data):
            stands = await self._files.run(end, self._files.read, path, MOST_MANIFEST_NBYTES)
            if stands is None or unseal(self._signer, "version", stands, path) != body:
                raise VersionExistsError(self._key, pinned.version, newest)
        return manifest

    async def _show(self, manifest: MirrorManifest, end: float) -> None:
        """Publish the number of a complete version for readers."""
        there = await self._files.run(end, self._files.versions)
        kept = [number for number in there if number <= manifest.number][-self._keep :]
        latest = LatestVersion(manifest.number, kept[0] if kept else manifest.number)
        data = seal(self._signer, "latest", latest.encode(self._key))
        await self._files.run(end, self._files.write, self._files.latest, data)

    async def _remove_old(self, end: float) -> None:
        """Remove versions that readers no longer find. Manifests go last, so that a killed removal is repeated."""
        latest = await read_latest(self._files, self._signer, self._key, end)
        if latest is None:
            return
        numbers = await self._files.run(end, self._files.versions)
        old = [number for number in numbers if number < latest.oldest]
        if not old:
            return
        manifests = {number: await self._manifest(number, end) for number in numbers}
        needed = {d for number, found in manifests.items() if number not in old and found for d in found.digests()}
        for number in old:
            found = manifests[number]
            await self._remove(found.digests() - needed if found else set(), end)
            await self._files.run(end, self._files.remove, self._files.version(number))

    async def _remove(self, digests: set[str], end: float) -> None:
        paths = (self._files.chunk(digest) for digest in digests)
        await self._files.run_all(end, self._files.remove, paths)

    async def _manifest(self, number: int, end: float) -> MirrorManifest | None:
        return await read_manifest(self._files, self._signer, number, end)


async def read_latest(files: MirrorFiles, verifier: Verifier, key: str, end: float) -> LatestVersion | None:
    """The versions that a mirror shows; None: it shows none.

    Raises:
        MirrorError: The file cannot be read, or is not the publisher's.
    """
    data = await files.run(end, files.read, files.latest, _LATEST_NBYTES)
    if data is None:
        return None
    return LatestVersion.decode(unseal(verifier, "latest", data, files.latest), key, files.latest)


async def read_manifest(files: MirrorFiles, verifier: Verifier, number: int, end: float) -> MirrorManifest | None:
    """The manifest under this number; None: there is none.

    Raises:
        MirrorError: The file cannot be read, or is not the publisher's.
    """
    path = files.version(number)
    data = await files.run(end, files.read, path, MOST_MANIFEST_NBYTES)
    if data is None:
        return None
    return MirrorManifest.decode(unseal(verifier, "version", data, path), path)


@dataclass(slots=True)
class _Chunk:
    """A chunk to write, unless it exists."""

    name: str
    index: int
    box: Box
    bytes: torch.Tensor


class _Upload:
    """The chunks of one version while they are written."""

    def __init__(self, files: MirrorFiles, pinned: PinnedVersion, known: set[str], chunk_nbytes: int) -> None:
        self._files = files
        self._pinned = pinned
        self._known = known
        self._stored = pinned.tensors()
        self._shapes = {
            name: chunk_shape(found.stored_shape, found.dtype.itemsize, chunk_nbytes)
            for name, found in self._stored.items()
        }
        self._digests: dict[str, dict[int, str]] = {name: {} for name in self._stored}

    def batches(self, nbytes: int) -> Iterator[list[_Chunk]]:
        """The chunks, at least one at a time, and as many as fit into the memory limit."""
        batch: list[_Chunk] = []
        held = 0
        for name, found in self._stored.items():
            empty = MirroredTensor(str(found.dtype), found.stored_shape, self._shapes[name], ())
            for index, box in empty.grid(Box.whole(found.stored_shape)):
                room = new_tensor(box.shape, str(found.dtype))
                if batch and held + room.nbytes > nbytes:
                    yield batch
                    batch, held = [], 0
                batch.append(_Chunk(name, index, box, room))
                held += room.nbytes
        if batch:
            yield batch

    async def upload(self, batch: list[_Chunk], end: float) -> None:
        """Read chunks from the store, and write those that are missing."""
        left = max(end - asyncio.get_running_loop().time(), 0.05)
        await self._pinned.read([PinnedBlock(each.name, each.box.offsets, each.bytes) for each in batch], left)
        digests = await self._files.run_all(end, self._put, batch)
        for each, digest in zip(batch, digests, strict=True):
            self._digests[each.name][each.index] = digest

    def tensors(self) -> dict[str, MirroredTensor]:
        """The manifest's entries, when everything has been written."""
        return {
            name: MirroredTensor(
                str(found.dtype),
                found.stored_shape,
                self._shapes[name],
                tuple(self._digests[name][index] for index in range(len(self._digests[name]))),
                found.scaled,
            )
            for name, found in self._stored.items()
        }

    def _put(self, chunk: _Chunk) -> str:
        """Write one chunk unless it exists. Runs in a thread."""
        data = memoryview(chunk.bytes.reshape(-1).view(torch.uint8).numpy().data)
        digest = hashlib.sha256(data).hexdigest()
        if digest in self._known:
            return digest
        path = self._files.chunk(digest)
        if self._files.size(path) != len(data):
            self._files.write(path, data)
        return digest
