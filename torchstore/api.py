"""The store's functions. The script initializes a store; the script and every actor of its job use it.

Each function takes ``store_name``, so that several stores live side by side, and ``timeout`` in seconds.
Names and argument order up to ``store_name`` are those of Meta's torchstore; what is keyword-only is ours.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from threading import Lock
from typing import Any, TypeVar

import torch

from control import ActorMesh, ProcMesh, get_or_spawn_controller
from torchstore.client import LocalClient, VersionSelector
from torchstore.controller import StaleClientError, StoreController
from torchstore.errors import StrategyError
from torchstore.manifest import Mode
from torchstore.process import this_process
from torchstore.records import SyncRecord
from torchstore.remote import DEFAULT_TIMEOUT_S, Remote, ask
from torchstore.slices import TensorSlice
from torchstore.strategy import ControllerStorageVolumes, TorchStoreStrategy

DEFAULT_STORE_NAME = "default"

T = TypeVar("T")

_clients: dict[str, LocalClient] = {}
_clients_lock = Lock()


async def initialize(
    num_storage_volumes: int = 1,
    strategy: TorchStoreStrategy | None = None,
    store_name: str = DEFAULT_STORE_NAME,
    mesh: ProcMesh | None = None,
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> None:
    """Start a store: its controller and its storage volumes. Call it once, in the script.

    Args:
        num_storage_volumes: How many volumes to start on this host. Ignored where ``mesh`` says it.
        strategy: Which client writes to which volume; with one volume the default is
            `ControllerStorageVolumes`.
        store_name: Stores of different names know nothing of each other.
        mesh: Processes to start the volumes in, one in each, in place of new ones.
        timeout: In seconds.

    Raises:
        StrategyError: More than one volume and no strategy, a strategy that names two volumes alike, or a
            store of this name that is running already.
    """
    if num_storage_volumes < 1:
        raise ValueError(f"a store needs at least one storage volume, not {num_storage_volumes}")
    if strategy is None:
        if num_storage_volumes > 1 or mesh is not None:
            raise StrategyError(
                "with several volumes, say which client writes to which: strategy=LocalRankStrategy() or HostStrategy()"
            )
        strategy = ControllerStorageVolumes()
    reset_client(store_name)
    controller = await _controller(store_name, timeout)
    await ask(controller.init.call_one(num_storage_volumes, strategy, mesh), timeout)


async def shutdown(store_name: str = DEFAULT_STORE_NAME, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
    """Forget all that is stored and stop the volumes. The store can be initialized anew afterwards."""
    reset_client(store_name)
    controller = await _controller(store_name, timeout)
    await ask(controller.teardown.call_one(), timeout)


async def client(store_name: str = DEFAULT_STORE_NAME, *, timeout: float = DEFAULT_TIMEOUT_S) -> LocalClient:
    """This process' client of a store, made at the first use.

    Raises:
        StoreNotInitializedError: Nobody has initialized a store of this name.
    """
    found = _clients.get(store_name)
    if found is None:
        controller = await _controller(store_name, timeout)
        info = await ask(controller.info.call_one(this_process()), timeout)
        with _clients_lock:  # two actors of one process may get here together: they share one client
            found = _clients.setdefault(store_name, LocalClient(Remote(store_name, controller, info)))
    return found


def reset_client(store_name: str = DEFAULT_STORE_NAME) -> None:
    """Forget this process' client (after a store was shut down and initialized again, for instance).

    Plans and registrations go with it; what this process published in direct mode cannot be read any more.
    """
    with _clients_lock:
        found = _clients.pop(store_name, None)
    if found is not None:
        found.close()


async def _run(store_name: str, timeout: float, operation: Callable[[LocalClient], Awaitable[T]]) -> T:
    """Do something with this process' client; with a new one if its store is of an earlier `initialize`."""
    try:
        return await operation(await client(store_name, timeout=timeout))
    except StaleClientError:
        reset_client(store_name)
        return await operation(await client(store_name, timeout=timeout))


async def put(
    key: str, value: Any, store_name: str = DEFAULT_STORE_NAME, *, timeout: float = DEFAULT_TIMEOUT_S
) -> None:
    """Store a tensor, this rank's shard of a DTensor, or any picklable object; replaces what is there.

    A DTensor is visible when every rank of its mesh has put its shard. The value is copied: change it
    afterwards as you like.

    Raises:
        MismatchError: The tensor cannot be stored (a Partial placement, no dense memory).
        VolumeLostError: The storage volume is dead.
    """
    await _run(store_name, timeout, lambda own: own.put(key, value, timeout=timeout))


async def put_batch(
    entries: Mapping[str, Any], store_name: str = DEFAULT_STORE_NAME, *, timeout: float = DEFAULT_TIMEOUT_S
) -> None:
    """`put` many values with one message to the controller; each is visible by itself."""
    await _run(store_name, timeout, lambda own: own.put_batch(entries, timeout=timeout))


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
        key: As it was put; ``"key/name"`` for one entry of a state dict.
        inplace_tensor: Filled and returned. A plain tensor (of any strides) takes the whole value, a
            DTensor takes its own shard, whatever the layout in which the value was put.
        tensor_slice_spec: Take only this part. With ``inplace_tensor``, that one has the part's shape.
        store_name: Which store.
        timeout: In seconds.

    Raises:
        KeyNotFoundError: Nothing is there (a `KeyError`).
        PartiallyPublishedError: Not all ranks of the mesh have put their shards yet (a `KeyError` too).
        LayoutMismatchError: Shapes or slices do not fit (a `ValueError`).
        DTypeMismatchError: The store never converts silently (a `TypeError`).
        KindMismatchError: An object is stored and a tensor was given, or it is a state dict.
    """
    return await _run(store_name, timeout, lambda own: own.get(key, inplace_tensor, tensor_slice_spec, timeout=timeout))


async def get_batch(
    keys: Iterable[str] | Mapping[str, torch.Tensor | TensorSlice | None],
    store_name: str = DEFAULT_STORE_NAME,
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> dict[str, Any]:
    """`get` many values with one message to the controller: all of them, or an error and none.

    Args:
        keys: The keys; or a dict that gives for each key a tensor to fill, a slice to take, or None.
        store_name: Which store.
        timeout: In seconds.

    Raises:
        KeyNotFoundError: Some key is missing; no tensor has been touched.
    """
    return await _run(store_name, timeout, lambda own: own.get_batch(keys, timeout=timeout))


async def delete(key: str, *, store_name: str = DEFAULT_STORE_NAME, timeout: float = DEFAULT_TIMEOUT_S) -> None:
    """Forget a key with all its versions; whoever is reading one finishes.

    Raises:
        KeyNotFoundError: There is no such key.
    """
    await _run(store_name, timeout, lambda own: own.delete(key, timeout=timeout))


async def delete_batch(
    keys: Iterable[str], *, store_name: str = DEFAULT_STORE_NAME, timeout: float = DEFAULT_TIMEOUT_S
) -> None:
    """`delete` many keys; those that are not there are passed over, so a cleanup can be repeated."""
    await _run(store_name, timeout, lambda own: own.delete_batch(keys, timeout=timeout))


async def keys(
    prefix: str | None = None,
    *,
    store_name: str = DEFAULT_STORE_NAME,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> list[str]:
    """Every key that begins with ``prefix``, sorted. Entries of state dicts are listed as ``key/name``."""
    return await _run(store_name, timeout, lambda own: own.keys(prefix, timeout=timeout))


async def exists(key: str, store_name: str = DEFAULT_STORE_NAME, *, timeout: float = DEFAULT_TIMEOUT_S) -> bool:
    """Whether there is something to read: a value whose shards are not all there does not count."""
    return await _run(store_name, timeout, lambda own: own.exists(key, timeout=timeout))


async def versions(
    key: str, *, store_name: str = DEFAULT_STORE_NAME, timeout: float = DEFAULT_TIMEOUT_S
) -> tuple[int, ...]:
    """The versions of a key that can be read, oldest first; none for an unknown key."""
    return await _run(store_name, timeout, lambda own: own.versions(key, timeout=timeout))


async def put_state_dict(
    state_dict: Mapping[Any, Any],
    key: str,
    store_name: str = DEFAULT_STORE_NAME,
    direct_rdma: bool = False,
    *,
    mode: Mode | None = None,
    version: int | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> int:
    """Publish this rank's part of a state dict as one version, which becomes visible whole or not at all.

    Args:
        state_dict: Nested dicts (lists, tuples) of tensors, DTensors and picklable objects. Ranks of one
            mesh put the same names; each contributes its shards.
        key: Where.
        store_name: Which store.
        direct_rdma: The older name of ``mode="direct"``.
        mode: "snapshot" (the default) copies into a storage volume, and the version outlives this process.
            "direct" copies nothing: readers take the bytes from these tensors, which must stay alive and
            unchanged until `fence` (or `wait_for_readers`) says that nobody reads them any more.
        version: A number higher than those before; by default the next one. Ranks that give none are
            matched by order: the n-th put of each rank of the mesh makes the n-th version.
        timeout: In seconds.

    Returns:
        The version's number. Other ranks may not have put their parts yet.

    Raises:
        VersionExistsError: That version is ready already, or a newer one is.
        MismatchError: A tensor cannot be stored.
        VolumeLostError: The storage volume is dead.
    """
    return await _run(
        store_name,
        timeout,
        lambda own: own.put_state_dict(
            state_dict,
            key,
            mode=mode or ("direct" if direct_rdma else "snapshot"),
            version=version,
            timeout=timeout,
        ),
    )


async def get_state_dict(
    key: str,
    user_state_dict: Mapping[Any, Any] | None = None,
    strict: bool = True,
    store_name: str = DEFAULT_STORE_NAME,
    direct_rdma: bool = False,
    *,
    version: VersionSelector = "latest",
    timeout: float = DEFAULT_TIMEOUT_S,
) -> dict[Any, Any]:
    """Read one version of a state dict, into the tensors of ``user_state_dict`` where there are some.

    Args:
        key: As it was put.
        user_state_dict: Its tensors are filled in place; DTensors take their own shard, in whatever layout.
            Names are compared as `put_state_dict` flattens them.
        strict: Refuse when the names of the two state dicts differ. Otherwise what is stored is read: into
            the given tensor where there is one, into a new one where there is none.
        store_name: Which store.
        direct_rdma: Accepted and not needed: a version knows where its bytes are.
        version: "latest", a number, or ("newer_than", number), which waits for the next version.
        timeout: In seconds, the wait for a version included.

    Returns:
        The state dict, nested as it was put, holding the given tensors.

    Raises:
        KeyNotFoundError: No such key or version.
        PartiallyPublishedError: No version is whole yet.
        StoreTimeoutError: ("newer_than", n): no such version in time.
        CoverageError, DTypeMismatchError, LayoutMismatchError, StateDictMismatchError: The two do not fit;
            found before the first byte was moved.
        SourceChangedError: Direct mode, exact version: its publisher took it back.
        PublisherLostError: Direct mode: the publisher is dead.
        VolumeLostError: Snapshot mode: the volume is dead.
    """
    return await _run(
        store_name,
        timeout,
        lambda own: own.get_state_dict(key, user_state_dict, strict=strict, version=version, timeout=timeout),
    )


async def wait_for_readers(
    key: str, *, store_name: str = DEFAULT_STORE_NAME, timeout: float = DEFAULT_TIMEOUT_S
) -> None:
    """Direct mode: wait until nobody reads what this process has published under ``key``.

    New readers may come at any moment; `fence` keeps them away as well.

    Raises:
        StoreTimeoutError: Somebody still reads; the message names the processes.
    """
    await _run(store_name, timeout, lambda own: own.wait_for_readers(key, timeout=timeout))


async def fence(key: str, *, store_name: str = DEFAULT_STORE_NAME, timeout: float = DEFAULT_TIMEOUT_S) -> None:
    """Direct mode: take the published version back, and return when the tensors may be written again.

    From the call on, nobody can begin to read the version: who asks for the latest one waits for the next.
    The call returns when those who were reading are done. A reader that is late all the same finds the
    seal broken and gets `SourceChangedError`, never a mixture.

    Raises:
        StoreTimeoutError: Somebody still reads; the message names the processes. The version stays closed.
    """
    await _run(store_name, timeout, lambda own: own.fence(key, timeout=timeout))


def last_sync(store_name: str = DEFAULT_STORE_NAME) -> SyncRecord | None:
    """What this process' last finished put or get on a store did; None before the first."""
    found = _clients.get(store_name)
    return found.last_sync if found is not None else None


async def _controller(store_name: str, timeout: float) -> ActorMesh[StoreController]:
    if not isinstance(store_name, str):
        raise TypeError(f"store_name is a string, not {store_name!r}")
    return await ask(get_or_spawn_controller(f"torchstore/{store_name}", StoreController, store_name), timeout)
