"""Put and get adapters: a version of an adapter names the version of the base that it belongs to."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from skipper.control.model.bounds import check_seconds
from skipper.torchstore.clients.local_client import LocalClient
from skipper.torchstore.clients.pinning import PinnedBlock, PinnedVersion
from skipper.torchstore.clients.registry import DEFAULT_STORE_NAME, run
from skipper.torchstore.clients.remote import DEFAULT_TIMEOUT_S
from skipper.torchstore.clients.requests import VersionSelector
from skipper.torchstore.errors import (
    AdapterBaseMismatchError,
    KindMismatchError,
    LayoutMismatchError,
    StateDictMismatchError,
)
from skipper.torchstore.lora.adapter import BaseVersion, LoRAAdapter
from skipper.torchstore.support.coroutines import public
from skipper.torchstore.tensors.cells import region
from skipper.torchstore.tensors.local_tensors import LocalTensor, describe
from skipper.torchstore.tensors.values import new_tensor
from skipper.torchstore.tensors.written import written
from skipper.torchstore.weights import put_state_dict

_TENSORS, _CONFIG, _BASE = "tensors", "config", "base"


@public
async def put_lora(
    adapter: LoRAAdapter,
    key: str,
    store_name: str = DEFAULT_STORE_NAME,
    *,
    version: int | None = None,
    keep: int | None = None,
    checksum: bool | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> int:
    """Put an adapter as one version; its base does not change.

    With DTensors every rank puts its own, as in `put_state_dict`.

    Args:
        adapter: An adapter of `lora_adapter_of`, with its ``base``.
        key: The key of the adapter; not that of the base.
        store_name: Name of the store.
        version: As for `put_state_dict`.
        keep: As for `put_state_dict`.
        checksum: As for `put_state_dict`.
        timeout: In seconds.

    Returns:
        The version's number.

    Raises:
        ValueError: The adapter does not say what its base is, or ``key`` is the key of the base.
        StoreError: As for `put_state_dict`.
    """
    if adapter.base is None:
        raise ValueError("the adapter has no base: give lora_adapter_of(..., base=BaseVersion(key, version))")
    if adapter.base.key == key:
        raise ValueError(f"{key!r} is the key of the base: put the adapter under another key")
    base = (adapter.base.key, adapter.base.version)
    entries = {_TENSORS: dict(adapter.tensors), _CONFIG: (dict(adapter.config),), _BASE: (base,)}
    return await put_state_dict(
        entries, key, store_name, version=version, keep=keep, checksum=checksum, timeout=timeout
    )


@public
async def get_lora(
    key: str,
    into: LoRAAdapter | None = None,
    store_name: str = DEFAULT_STORE_NAME,
    *,
    base: BaseVersion | None = None,
    version: VersionSelector = "latest",
    timeout: float = DEFAULT_TIMEOUT_S,
) -> LoRAAdapter:
    """Read one version of an adapter.

    Args:
        key: The key of the adapter.
        into: An adapter whose tensors are filled in place; DTensors take their shard. None: new, whole tensors on the
            host.
        store_name: Name of the store.
        base: The base that this process has; an adapter of another base is refused before a tensor is read. None: the
            base of ``into``, or any base if there is none.
        version: "latest", a number, or ("newer_than", number), which waits for the next version.
        timeout: In seconds, including the wait for a version.

    Returns:
        The adapter, with its config, base and version; with the tensors of ``into`` if that was given.

    Raises:
        AdapterBaseMismatchError: The adapter belongs to another base.
        KindMismatchError: What is stored there is not an adapter.
        StateDictMismatchError: ``into`` has other tensors than the stored adapter.
        LayoutMismatchError, DTypeMismatchError: A tensor of ``into`` does not fit.
        KeyNotFoundError, StoreTimeoutError, VolumeLostError, ChecksumError: As for `get_state_dict`.
    """
    wanted = base if base is not None or into is None else into.base
    read = _Read(key, into, wanted, time.perf_counter() + check_seconds("timeout", timeout))
    number = await run(
        store_name,
        timeout,
        LocalClient.with_pinned,
        key,
        read.fill,
        into and into.tensors,
        version=version,
        timeout=timeout,
    )
    return LoRAAdapter(MappingProxyType(read.tensors), MappingProxyType(read.config), read.base, number)


@dataclass(slots=True)
class _Read:
    """One call of `get_lora`."""

    key: str
    into: LoRAAdapter | None
    wanted: BaseVersion | None
    end: float
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    base: BaseVersion | None = None

    async def fill(self, pinned: PinnedVersion) -> None:
        """Check that it is an adapter of this base, and read it."""
        objects = pinned.objects()
        if _CONFIG not in objects or _BASE not in objects:
            raise KindMismatchError(self.key, "no LoRA adapter is stored there: put_lora puts one")
        (self.config,), (base,) = objects[_CONFIG], objects[_BASE]
        self.base = BaseVersion(*base)
        if self.wanted is not None and self.base != self.wanted:
            raise AdapterBaseMismatchError(self.key, pinned.version, base, (self.wanted.key, self.wanted.version))
        stored = {name.removeprefix(f"{_TENSORS}."): found for name, found in pinned.tensors().items()}
        if self.into is None:
            self.tensors = {name: new_tensor(found.shape, str(found.dtype)) for name, found in stored.items()}
        else:
            self.tensors = dict(self.into.tensors)
        missing = tuple(name for name in self.tensors if name not in stored)
        unexpected = tuple(name for name in stored if name not in self.tensors)
        if missing or unexpected:
            raise StateDictMismatchError(self.key, missing, unexpected)
        blocks: list[PinnedBlock] = []
        for name, tensor in self.tensors.items():
            local = describe(tensor, key=f"{self.key}/{name}")
            if local.global_shape != stored[name].shape:
                raise LayoutMismatchError(
                    f"{self.key}/{name}", f"stored with shape {stored[name].shape}, requested with {local.global_shape}"
                )
            blocks += _blocks(f"{_TENSORS}.{name}", local)
        with written(self.tensors.values()):
            await pinned.read(blocks, max(self.end - time.perf_counter(), 0.05), again=self.into is not None)


def _blocks(name: str, local: LocalTensor) -> list[PinnedBlock]:
    """This process' parts of a tensor, as blocks to read."""
    return [
        PinnedBlock(name, piece.box.offsets, region(local.tensor, piece.local, piece.box.shape))
        for piece in local.pieces
    ]
