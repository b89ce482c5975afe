"""Stores, and the values in them. The script initializes a store; the script and every actor of its job use it.

Each function takes ``store_name``, so that a job can have several stores, and ``timeout`` in seconds.
Names and argument order up to ``store_name`` are those of Meta's torchstore; keyword-only arguments are ours.
State dicts and their versions are in `torchstore.weights`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import torch

from skipper.control import ProcMesh
from skipper.control.model.bounds import MAX_PROCESSES, check_count
from skipper.control.runtime import current_runtime
from skipper.torchstore.algebra.copies import check_copies
from skipper.torchstore.algebra.key_names import check_keys
from skipper.torchstore.algebra.slices import TensorSlice
from skipper.torchstore.clients import mesh_publishers
from skipper.torchstore.clients.local_client import LocalClient
from skipper.torchstore.clients.registry import DEFAULT_STORE_NAME, controller_of, reset_client, run
from skipper.torchstore.clients.remote import DEFAULT_TIMEOUT_S
from skipper.torchstore.clients.requests import check_keep
from skipper.torchstore.errors import StrategyError
from skipper.torchstore.protocol.messages import StoreSettings
from skipper.torchstore.protocol.meta import ValueMeta
from skipper.torchstore.protocol.origin import Origin
from skipper.torchstore.protocol.strategy import ControllerStorageVolumes, TorchStoreStrategy
from skipper.torchstore.support.coroutines import public
from skipper.torchstore.support.deadlines import ask
from skipper.torchstore.tensors.certifying import Certify, check_certify

shut_down_together: dict[str, Callable[[float], Awaitable[None]]] = {}
"""The functions by which `shutdown` ends stores that all ranks of an SPMD job have initialized; given its timeout."""


@public
async def initialize(
    num_storage_volumes: int = 1,
    strategy: TorchStoreStrategy | None = None,
    store_name: str = DEFAULT_STORE_NAME,
    mesh: ProcMesh | None = None,
    *,
    keep_versions: int = 1,
    volume_nbytes: int | None = None,
    checksum: bool = False,
    copies: int = 1,
    certify: Certify = False,
    journal: bool = False,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> None:
    """Start a store: its controller and its storage volumes. Call it once, in the script.

    Args:
        num_storage_volumes: How many volumes to start on this host. Ignored with ``mesh``.
        strategy: Which client writes to which volume; with one volume the default is
            `ControllerStorageVolumes`.
        store_name: Stores of different names are independent.
        mesh: Processes to start the volumes in, one in each, instead of new processes.
        keep_versions: How many ready versions of each key stay readable, in addition to those that are being read;
            `put_state_dict` can set another number for its key.
        volume_nbytes: How many bytes each volume may hold; None: as many as the system gives. A put that finds its
            volume full deletes the oldest kept versions that are not being read; the newest of each key stays. If
            that is not enough it waits, until its timeout, for readers to finish.
        checksum: Whether puts take checksums by default (see `put_state_dict`).
        copies: In how many volumes puts store each part by default (see `put_state_dict`).
        certify: Whether, and in which dtypes, state dicts are certified by default (see `put_state_dict`).
        journal: Whether the store outlives its controller. The controller then has a process of its own and records
            each change in memory of this process before it confirms the change. When it dies, another controller reads
            the record and continues; clients reconnect by themselves within their timeouts. Volumes are in this process
            only if ``mesh`` says so.
        timeout: In seconds.

    Raises:
        StrategyError: There are several volumes and no strategy, the strategy gives two volumes the same name, a store
            of this name is already running, or there are fewer volumes than copies.
    """
    check_keep(keep_versions)
    if volume_nbytes is not None and volume_nbytes < 1:
        raise ValueError(f"a volume needs at least one byte, not {volume_nbytes}")
    check_copies(copies)
    check_certify(certify)
    check_count("num_storage_volumes", num_storage_volumes, 1, MAX_PROCESSES)
    if strategy is None:
        if num_storage_volumes > 1 or mesh is not None:
            raise StrategyError(
                "with several volumes, say which client writes to which: strategy=LocalRankStrategy() or HostStrategy()"
            )
        strategy = ControllerStorageVolumes()
    reset_client(store_name)
    await mesh_publishers.leave(store_name, timeout)
    controller = await controller_of(store_name, timeout)
    settings = StoreSettings(keep_versions, checksum, copies, certify, journal)
    await ask(controller.init.call_one(num_storage_volumes, strategy, mesh, volume_nbytes, settings), timeout)


@public
async def shutdown(store_name: str = DEFAULT_STORE_NAME, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
    """Delete everything that is stored and stop the volumes. The store can be initialized again afterwards.

    After `initialize_spmd` every rank calls it; it returns when rank 0 has shut the store down.
    """
    together = shut_down_together.pop(store_name, None)
    await (together(timeout) if together is not None else teardown(store_name, timeout))


async def teardown(store_name: str, timeout: float) -> None:
    """The part of `shutdown` in the process that has initialized the store."""
    reset_client(store_name)
    await mesh_publishers.leave(store_name, timeout)
    if not current_runtime.is_running():  # nothing is left here, and no job is started only to find that out
        return
    controller = await controller_of(store_name, timeout)
    await ask(controller.teardown.call_one(), timeout)


@public
async def put(
    key: str,
    value: Any,
    store_name: str = DEFAULT_STORE_NAME,
    *,
    checksum: bool | None = None,
    version: int | None = None,
    publisher: Origin | tuple[int, int] | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> None:
    """Store a tensor, this rank's shard of a DTensor, or any picklable object; replaces what is there.

    A DTensor becomes visible when every rank of the process group, or every one of the ``publisher`` group (see
    `put_state_dict`), has put its shard; any other value at once, from any process. A script can put a DTensor on a
    mesh of the tensor engine, or a tensor of a mesh of one rank: the ranks put it, as it is at this point of the
    program. The value is copied: you may change it afterwards. ``checksum`` and ``version`` (a number higher than those
    before, by default the next one) are those of `put_state_dict`; values that are sent in a message have no checksum.

    Raises:
        TypeError: ``publisher`` is given, and the value is not a tensor.
        MismatchError: The tensor cannot be stored (a Partial placement, no dense memory).
        VersionExistsError: That version is ready already, or a newer one is.
        LateShareError, OutOfStepError, ShareMismatchError: As for `put_state_dict`.
        VolumeLostError: The storage volume is dead.
    """
    if await mesh_publishers.put_value(
        key, value, store_name, timeout, checksum=checksum, version=version, publisher=publisher
    ):
        return
    await run(
        store_name,
        timeout,
        LocalClient.put,
        key,
        value,
        checksum=checksum,
        version=version,
        publisher=publisher,
        timeout=timeout,
    )


@public
async def put_batch(
    entries: Mapping[str, Any],
    store_name: str = DEFAULT_STORE_NAME,
    *,
    checksum: bool | None = None,
    version: int | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> None:
    """`put` many values with one message to the controller: all of them become visible in one step, or none.

    Each key has versions of its own. The tensors of a batch are written into one arena of the volume by one transfer
    (large ones, shards, and those with checksums have arenas of their own); two names of the same memory are stored
    once. When some keys of a batch are deleted or put again, the memory of their values goes back to the system; that
    of the others stays where it is.

    Args:
        entries: The values by key.
        store_name: Name of the store.
        checksum: As for `put_state_dict`; values that are sent in a message have none.
        version: The version of every key: a number higher than those before; every tensor then has an arena of its own.
            None: the next version of each key.
        timeout: In seconds.

    Raises:
        MismatchError: A value cannot be stored; the error names its key, and nothing was sent.
        VersionExistsError: A key has that version already, or a newer one; nothing of the batch is visible.
        VolumeFullError: The values are larger than all that the volume may hold.
        VolumeLostError: The storage volume is dead; nothing of the batch is visible.
    """
    if isinstance(entries, Mapping):
        mesh_publishers.refuse_in_batch(entries)
    await run(store_name, timeout, LocalClient.put_batch, entries, checksum=checksum, version=version, timeout=timeout)


@public
async def get(
    key: str,
    inplace_tensor: torch.Tensor | None = None,
    tensor_slice_spec: TensorSlice | None = None,
    store_name: str = DEFAULT_STORE_NAME,
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> Any:
    """Read a value: a whole new tensor, or into the given one.

    Args:
        key: The key of the put; ``"key/name"`` for one entry of a state dict.
        inplace_tensor: A tensor to fill and return. A plain tensor (of any strides) gets the whole value, a DTensor its
            own shard, from any layout in which the value was put. An entry that was quantized by the put (`BlockFP8`,
            `MXFP8`, `NVFP4`) is dequantized if the tensor's dtype is wider.
        tensor_slice_spec: Read only this part. ``inplace_tensor`` then has the part's shape.
        store_name: Name of the store.
        timeout: In seconds.

    Raises:
        KeyNotFoundError: Nothing is there (a `KeyError`).
        PartiallyPublishedError: Not all ranks of the mesh have put their shards yet (a `KeyError` too).
        LayoutMismatchError: Shapes or slices do not fit (a `ValueError`).
        DTypeMismatchError: The stored dtype is another one; the store never converts silently (a `TypeError`).
        ChecksumError: It was put with ``checksum=True``, and the bytes that arrived are not the same.
        KindMismatchError: An object is stored and a tensor was given, or a state dict is stored.
    """
    if inplace_tensor is not None:
        mesh_publishers.refuse_destinations({key: inplace_tensor})
    return await run(store_name, timeout, LocalClient.get, key, inplace_tensor, tensor_slice_spec, timeout=timeout)


@public
async def get_batch(
    keys: Iterable[str] | Mapping[str, torch.Tensor | TensorSlice | None],
    store_name: str = DEFAULT_STORE_NAME,
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> dict[str, Any]:
    """`get` many values with one message to the controller and one transfer: all of them, or none and an error.

    Args:
        keys: The keys; or a dict that gives for each key a tensor to fill, a slice to take, or None.
        store_name: Name of the store.
        timeout: In seconds.

    Raises:
        KeyNotFoundError: A key is missing; no tensor has been changed.
        MismatchError: A destination does not fit, or is also that of another value; no tensor has been changed.
        VolumeLostError: A storage volume is dead.
    """
    if isinstance(keys, Mapping):
        mesh_publishers.refuse_destinations(keys)
    return await run(store_name, timeout, LocalClient.get_batch, keys, timeout=timeout)


@public
async def delete(key: str, *, store_name: str = DEFAULT_STORE_NAME, timeout: float = DEFAULT_TIMEOUT_S) -> None:
    """Delete a key with all its versions. Reads that have begun can finish.

    Raises:
        KeyNotFoundError: There is no such key.
    """
    await run(store_name, timeout, LocalClient.delete, key, timeout=timeout)
    await mesh_publishers.forget((key,), store_name, timeout)


@public
async def delete_batch(
    keys: Iterable[str], *, store_name: str = DEFAULT_STORE_NAME, timeout: float = DEFAULT_TIMEOUT_S
) -> None:
    """`delete` many keys; keys that do not exist are skipped, so a cleanup can be repeated."""
    gone = check_keys(keys)
    await run(store_name, timeout, LocalClient.delete_batch, gone, timeout=timeout)
    await mesh_publishers.forget(gone, store_name, timeout)


@public
async def keys(
    prefix: str | None = None,
    *,
    store_name: str = DEFAULT_STORE_NAME,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> list[str]:
    """Every key below ``prefix``, sorted; None: every key. Entries of state dicts are listed as ``key/name``.

    A prefix matches whole components, between dots and slashes: "v0" lists "v0", "v0.x" and "v0/x", but not "v01". A
    prefix that ends in a dot or a slash lists all keys that begin with it.
    """
    return await run(store_name, timeout, LocalClient.keys, prefix, timeout=timeout)


@public
async def exists(key: str, store_name: str = DEFAULT_STORE_NAME, *, timeout: float = DEFAULT_TIMEOUT_S) -> bool:
    """Whether there is a value to read; a value without all of its shards does not count."""
    return await run(store_name, timeout, LocalClient.exists, key, timeout=timeout)


@public
async def exists_batch(
    keys: Iterable[str], store_name: str = DEFAULT_STORE_NAME, *, timeout: float = DEFAULT_TIMEOUT_S
) -> dict[str, bool]:
    """`exists` for many keys with one message to the controller. Returns the answers by key."""
    return await run(store_name, timeout, LocalClient.exists_batch, keys, timeout=timeout)


@public
async def get_meta(key: str, store_name: str = DEFAULT_STORE_NAME, *, timeout: float = DEFAULT_TIMEOUT_S) -> ValueMeta:
    """Describe what is stored under a key (names, dtypes, shapes, versions, where the bytes are), without reading it.

    Raises:
        KeyNotFoundError: There is no value, or in direct mode none that can be read at the moment.
    """
    return await run(store_name, timeout, LocalClient.get_meta, key, timeout=timeout)
