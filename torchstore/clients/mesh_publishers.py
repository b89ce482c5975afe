"""Puts of what lies on a mesh of the tensor engine: actors beside its workers put it, each what its own rank has.

The script sends the state dict, in which the engine has numbers in place of tensors. On each rank an actor gets it with
the tensors of that rank in its turn among the operations, and puts it as a rank of an SPMD program would: no tensor
comes by the script, and what the script does to the tensors after the call comes after the put.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Awaitable
from typing import Any, NoReturn

from skipper.control import Actor, ActorMesh, ProcMesh, ValueMesh, current_rank, endpoint
from skipper.control.api.tensor_engine_plugin import OnMesh
from skipper.torchstore.clients.local_client import LocalClient
from skipper.torchstore.clients.registry import run
from skipper.torchstore.clients.requests import StateDictPut
from skipper.torchstore.errors import LateShareError, StoreError, UnsupportedPlacementError
from skipper.torchstore.support.deadlines import ask


class MeshPublisher(Actor):
    """Puts what the worker of its process has."""

    def __init__(self, ranks: int) -> None:
        self._publisher = (current_rank().rank, ranks)

    @endpoint
    async def put_version(self, state_dict: Any, put: StateDictPut, store_name: str) -> StoreError | None:
        """See `weights.put_state_dict`; the store's own errors are returned."""
        whole = dataclasses.replace(put, state_dict=state_dict, publisher=self._publisher)
        return await _error_of(run(store_name, put.timeout, LocalClient.put_version, whole))

    @endpoint
    async def put(
        self, value: Any, key: str, store_name: str, timeout: float, checksum: bool | None, version: int
    ) -> StoreError | None:
        """See `api.put`; the store's own errors are returned."""
        put = run(
            store_name,
            timeout,
            LocalClient.put,
            key,
            value,
            checksum=checksum,
            version=version,
            publisher=self._publisher,
            timeout=timeout,
        )
        return await _error_of(put)

    @endpoint
    async def fence(self, key: str, store_name: str, timeout: float) -> None:
        """See `weights.fence`."""
        await run(store_name, timeout, LocalClient.fence, key, timeout=timeout)

    @endpoint
    async def wait_for_readers(self, key: str, store_name: str, timeout: float) -> None:
        """See `weights.wait_for_readers`."""
        await run(store_name, timeout, LocalClient.wait_for_readers, key, timeout=timeout)


async def _error_of(put: Awaitable[object]) -> StoreError | None:
    try:
        await put
    except StoreError as error:
        return error
    return None


_lock = threading.Lock()
_publishers: dict[tuple[str, ...], ActorMesh[MeshPublisher]] = {}
_of_keys: dict[tuple[str, str], ActorMesh[MeshPublisher]] = {}


async def put_version(found: OnMesh, put: StateDictPut, store_name: str) -> int:
    """Put a state dict with tensors of a mesh.

    Returns:
        The version's number.

    Raises:
        UnsupportedPlacementError: Nothing says what the tensors of the ranks have to do with each other.
        TypeError: ``publisher`` is given.
    """
    put.check()
    _refuse_publisher(put.publisher)
    if not found.is_whole and not put.verify_replicas:
        _refuse_shards(put.key, found.mesh)
    actors = _of_keys[store_name, put.key] = _publishers_on(found.mesh)
    return await _put_by(actors, put, store_name)


async def put_value(
    found: OnMesh,
    key: str,
    value: Any,
    store_name: str,
    timeout: float,
    *,
    checksum: bool | None,
    version: int | None,
    publisher: object,
) -> None:
    """Put one tensor of a mesh.

    Raises:
        UnsupportedPlacementError, TypeError: As of `put_version`.
    """
    _refuse_publisher(publisher)
    if not found.is_whole:
        _refuse_shards(key, found.mesh)
    actors = _publishers_on(found.mesh)
    number = await _number_of(key, version, store_name, timeout)
    _raise_of(await ask(actors.put.call(value, key, store_name, timeout, checksum, number), timeout))


async def put_again(put: StateDictPut, store_name: str) -> int:
    """Put in direct mode what was put last under a key, which lies on a mesh.

    Returns:
        The version's number.

    Raises:
        TypeError: ``publisher`` is given.
    """
    put.check()
    _refuse_publisher(put.publisher)
    return await _put_by(_of_keys[store_name, put.key], put, store_name)


async def fence(key: str, store_name: str, timeout: float) -> bool:
    """`weights.fence`, where a key was put last from a mesh; whether it was."""
    actors = _of_keys.get((store_name, key))
    if actors is not None:
        await ask(actors.fence.call(key, store_name, timeout), timeout)
    return actors is not None


async def wait_for_readers(key: str, store_name: str, timeout: float) -> bool:
    """`weights.wait_for_readers`, likewise."""
    actors = _of_keys.get((store_name, key))
    if actors is not None:
        await ask(actors.wait_for_readers.call(key, store_name, timeout), timeout)
    return actors is not None


def is_of_mesh(key: str, store_name: str) -> bool:
    """Whether this process has put a key last from a mesh."""
    return (store_name, key) in _of_keys


def forget_key(key: str, store_name: str) -> None:
    """This process has put it itself."""
    _of_keys.pop((store_name, key), None)


def forget_store(store_name: str) -> None:
    """It is initialized anew, or shut down."""
    for key in [key for key in list(_of_keys) if key[0] == store_name]:
        _of_keys.pop(key, None)


async def _put_by(actors: ActorMesh[MeshPublisher], put: StateDictPut, store_name: str) -> int:
    number = await _number_of(put.key, put.version, store_name, put.timeout)
    options = dataclasses.replace(put, state_dict=None, version=number)
    _raise_of(await ask(actors.put_version.call(put.state_dict, options, store_name), put.timeout))
    return number


def _raise_of(outcomes: ValueMesh[StoreError | None]) -> None:
    """Raise what says the most: that a rank came too late for a version is so because another one has failed."""
    errors = [each for each in outcomes.values() if each is not None]
    if errors:
        raise next((each for each in errors if not isinstance(each, LateShareError)), errors[0])


async def _number_of(key: str, version: int | None, store_name: str, timeout: float) -> int:
    """The version that the ranks put. They need not count their puts, in which one that fails would be out of step."""
    if version is not None:
        return version
    return await run(store_name, timeout, LocalClient.reserve, key, timeout=timeout)


def _publishers_on(mesh: ProcMesh) -> ActorMesh[MeshPublisher]:
    processes = tuple(member.id for member in mesh.members)
    with _lock:
        actors = _publishers.get(processes)
        if actors is None:
            actors = _publishers[processes] = mesh.spawn("torchstore_publishers", MeshPublisher, mesh.size)
    return actors


def _refuse_shards(key: str, mesh: ProcMesh) -> NoReturn:
    raise UnsupportedPlacementError(
        key,
        f"a tensor of {mesh!r} is one on each rank, and nothing says whether these are parts of a whole: make a "
        "DTensor of it (DTensor.from_local), or put that of one rank (tensor.slice_mesh(...)). If all ranks have the "
        "same, put_state_dict(..., verify_replicas=True) compares them",
    )


def _refuse_publisher(publisher: object) -> None:
    if publisher is not None:
        raise TypeError(
            "publisher= is for a process that puts what it has: of tensors of a mesh, the ranks are publishers"
        )
