"""Puts of tensors on meshes of the tensor engine: actors in its workers' processes put the tensors of their own rank.

The script sends the state dict, in which the engine has replaced tensors by numbers. On each rank an actor gets it with
the tensors of that rank, in order with the rank's other operations, and puts it like a rank of an SPMD program. No
tensor of a mesh passes through the script, and operations of the script after the call take effect after the put. All
ranks of all meshes are publishers of one version, and so is the script if it has tensors of its own as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

import torch

from skipper.control import Actor, ActorMesh, ControlError, Future, ProcMesh, ValueMesh, current_rank, endpoint
from skipper.control.api.tensor_engine_plugin import OnMesh, by_mesh, is_at_work
from skipper.torchstore.clients.local_client import LocalClient
from skipper.torchstore.clients.registry import reset_client, run
from skipper.torchstore.clients.requests import StateDictPut
from skipper.torchstore.errors import KindMismatchError, LateShareError, StoreError, UnsupportedPlacementError
from skipper.torchstore.protocol.origin import Origin
from skipper.torchstore.support.deadlines import ask
from skipper.torchstore.support.lru_cache import LRUCache
from skipper.torchstore.tensors.local_tensors import LocalTensor, is_dtensor
from skipper.torchstore.tensors.state_dict import Flattened, flatten
from skipper.torchstore.tensors.values import dump_entries

T = TypeVar("T")

_GROUP = "tensors of one script"
"""A separate group: its steps are not confused with those of actors that give ``publisher=(index, count)``."""

_KEPT = 64
"""The number of meshes whose actors are remembered."""

Refused = StoreError | TypeError | ValueError
"""The errors that a put raises: they are returned, so that the script gets those of all ranks."""


class MeshPublisher(Actor):
    """Puts the tensors of the worker in its process."""

    @endpoint
    async def put_version(
        self, state_dict: Flattened | None, put: StateDictPut, origin: Origin, store_name: str
    ) -> Refused | None:
        """See `weights.put_state_dict`. ``origin`` is the origin of the mesh's first rank."""
        rank = current_rank().rank
        if rank and state_dict is not None and put.mode == "snapshot" and not put.verify_replicas:
            state_dict = _shards_of(state_dict)  # the first rank stores objects that all ranks have
        whole = dataclasses.replace(put, state_dict=state_dict, publisher=_moved(origin, rank))
        error = await _error_of(run(store_name, put.timeout, LocalClient.put_version, whole))
        if put.mode == "snapshot":  # no object of the script may stay alive until the next put
            await run(store_name, put.timeout, _release, put.key)
        return error

    @endpoint
    async def put(
        self,
        value: torch.Tensor,
        key: str,
        store_name: str,
        timeout: float,
        checksum: bool | None,
        version: int,
        origin: Origin,
    ) -> Refused | None:
        """See `api.put`."""
        put = run(
            store_name,
            timeout,
            LocalClient.put,
            key,
            value,
            checksum=checksum,
            version=version,
            publisher=_moved(origin, current_rank().rank),
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

    @endpoint
    async def forget(self, keys: tuple[str, ...], store_name: str, timeout: float) -> None:
        """The script has deleted these keys: release what belongs to them."""
        await run(store_name, timeout, _forget, keys)

    @endpoint
    async def leave(self, store_name: str) -> None:
        """The script shuts down the store."""
        reset_client(store_name)


async def _release(client: LocalClient, key: str) -> None:
    client.publisher.snapshots.release(key)


async def _forget(client: LocalClient, keys: tuple[str, ...]) -> None:
    client.forget(keys)


async def _error_of(put: Awaitable[object]) -> Refused | None:
    try:
        await put
    except (StoreError, TypeError, ValueError) as error:
        return error
    return None


def _moved(origin: Origin, by: int) -> Origin:
    return dataclasses.replace(origin, rank=origin.rank + by)


def _shards_of(state_dict: Flattened) -> Flattened:
    """The DTensors alone."""
    return _part_of(
        state_dict.leaves, state_dict.paths, [name for name, each in state_dict.items() if is_dtensor(each)]
    )


def _part_of(leaves: Mapping[str, Any], paths: Mapping[str, Any], names: Sequence[str]) -> Flattened:
    return Flattened({name: leaves[name] for name in names}, {name: paths[name] for name in names})


@dataclass(frozen=True, slots=True)
class _Publishers:
    """The publishers of a key.

    Attributes:
        actors: The actors on each mesh, and the origin of the first of them.
        script: The origin of the script's own put; None: it puts nothing.
    """

    actors: tuple[tuple[ActorMesh[MeshPublisher], Origin], ...]
    script: Origin | None

    @staticmethod
    def on(found: Sequence[OnMesh], *, with_script: bool) -> _Publishers:
        """The publishers on these meshes; actors are spawned on meshes that have none yet."""
        size = sum(each.mesh.size for each in found) + with_script
        actors, first = [], 0
        for each in found:
            actors.append((_actors_on(each.mesh), Origin(_GROUP, first, size)))
            first += each.mesh.size
        return _Publishers(tuple(actors), Origin(_GROUP, first, size) if with_script else None)


_lock = threading.Lock()
_actors: LRUCache[tuple[str, ...], ActorMesh[MeshPublisher]] = LRUCache(_KEPT)
_of_keys: dict[tuple[str, str], _Publishers] = {}


async def put_version(put: StateDictPut, store_name: str) -> int | None:
    """Put a state dict if it has tensors of meshes, or if None means a state dict with such tensors.

    Returns:
        The version's number; None: it has none, and nothing was done.

    Raises:
        UnsupportedPlacementError: It is unknown how the tensors of the ranks are related.
        KindMismatchError: An object in it cannot be pickled.
        TypeError: ``publisher`` is given.
        The errors of `TensorEngine.by_mesh`. All of these are raised before anything is sent.
    """
    publishers = _of_keys.get((store_name, put.key)) if put.state_dict is None else None
    if publishers is not None:
        put.check()
        _refuse_publisher(put.publisher)
        return await _put_by(publishers, [None] * len(publishers.actors), None, put, store_name)
    if not is_at_work() or not isinstance(put.state_dict, Mapping):
        _of_keys.pop((store_name, put.key), None)
        return None
    leaves, paths = flatten(put.state_dict)
    found = by_mesh(leaves)
    if not found:
        _of_keys.pop((store_name, put.key), None)
        return None
    put.check()
    _refuse_publisher(put.publisher)
    for each in found:
        if each.mesh.size > 1 and not put.verify_replicas and not any(is_dtensor(leaves[name]) for name in each.names):
            _refuse_shards(f"{put.key}/{each.names[0]}", each.mesh)
    there = {name for each in found for name in each.names}
    others = [name for name in leaves if name not in there]
    objects = {name: leaves[name] for name in others if not isinstance(leaves[name], torch.Tensor | LocalTensor)}
    dump_entries(put.key, objects)
    with_script = len(objects) < len(others)
    first = [] if with_script else others  # objects go with a publisher that exists anyway
    parts = [_part_of(leaves, paths, [*each.names, *([] if index else first)]) for index, each in enumerate(found)]
    own = _part_of(leaves, paths, others) if with_script else None
    publishers = _of_keys[store_name, put.key] = _Publishers.on(found, with_script=with_script)
    return await _put_by(publishers, parts, own, put, store_name)


async def put_value(
    key: str,
    value: object,
    store_name: str,
    timeout: float,
    *,
    checksum: bool | None,
    version: int | None,
    publisher: object,
) -> bool:
    """Put one tensor, if it is on a mesh. Returns whether it is.

    Raises:
        The errors of `put_version`.
    """
    if not isinstance(value, torch.Tensor) or type(value) is torch.Tensor:
        return False
    found = by_mesh({key: value})
    if not found:
        return False
    _refuse_publisher(publisher)
    if found[0].mesh.size > 1 and not is_dtensor(value):
        _refuse_shards(key, found[0].mesh)
    ((actors, first),) = _Publishers.on(found, with_script=False).actors
    number = await _number_of(key, version, store_name, timeout)
    _raise_of(await ask(actors.put.call(value, key, store_name, timeout, checksum, number, first), timeout))
    return True


def refuse_in_batch(entries: Mapping[str, object]) -> None:
    """Refuse tensors of meshes in a batch, because its values become visible in one step.

    Raises:
        KindMismatchError: There is such a tensor; nothing was sent.
    """
    _refuse(entries, "put each by put, or all of them as one state dict by put_state_dict")


def refuse_destinations(tensors: Mapping[str, object]) -> None:
    """Refuse tensors of meshes, by key, as destinations of a read.

    Raises:
        KindMismatchError: There is such a tensor; nothing was read.
    """
    _refuse(tensors, "pass it to an endpoint of an actor on that mesh, in which each rank reads its shard")


def refuse_destination(key: str, state_dict: object) -> None:
    """The same for the tensors of a state dict.

    Raises:
        KindMismatchError: There is such a tensor; nothing was read.
    """
    if is_at_work() and isinstance(state_dict, Mapping):
        refuse_destinations({f"{key}/{name}": each for name, each in flatten(state_dict)[0].items()})


def _refuse(tensors: Mapping[str, object], instead: str) -> None:
    for each in by_mesh(tensors):
        raise KindMismatchError(each.names[0], f"a tensor of {each.mesh!r} has no memory here: {instead}")


async def fence(key: str, store_name: str, timeout: float) -> bool:
    """`weights.fence`, if the last put of a key was from meshes. Returns whether it was."""
    return await _by_publishers("fence", key, store_name, timeout)


async def wait_for_readers(key: str, store_name: str, timeout: float) -> bool:
    """`weights.wait_for_readers`, if the last put of a key was from meshes. Returns whether it was."""
    return await _by_publishers("wait_for_readers", key, store_name, timeout)


async def _by_publishers(
    method: Literal["fence", "wait_for_readers"], key: str, store_name: str, timeout: float
) -> bool:
    publishers = _of_keys.get((store_name, key))
    if publishers is None:
        return False
    calls = [getattr(actors, method).call(key, store_name, timeout) for actors, _ in publishers.actors]
    if publishers.script is not None:
        await run(store_name, timeout, getattr(LocalClient, method), key, timeout=timeout)
    await _all_of(calls, timeout)
    return True


async def forget(keys: Sequence[str], store_name: str, timeout: float) -> None:
    """These keys were deleted: the ranks release what belongs to them."""
    if not _of_keys:
        return
    gone: dict[ActorMesh[MeshPublisher], list[str]] = {}
    for key in keys:
        publishers = _of_keys.pop((store_name, key), None)
        for actors, _ in publishers.actors if publishers is not None else ():
            gone.setdefault(actors, []).append(key)
    with contextlib.suppress(ControlError):  # dead processes hold nothing
        await _all_of([each.forget.call(tuple(theirs), store_name, timeout) for each, theirs in gone.items()], timeout)


async def leave(store_name: str, timeout: float) -> None:
    """The store is initialized again, or shut down."""
    gone: set[ActorMesh[MeshPublisher]] = set()
    for name, key in [each for each in list(_of_keys) if each[0] == store_name]:
        publishers = _of_keys.pop((name, key), None)
        gone.update(actors for actors, _ in publishers.actors) if publishers is not None else None
    with contextlib.suppress(ControlError):
        await _all_of([each.leave.call(store_name) for each in gone], timeout)


async def _put_by(
    publishers: _Publishers,
    parts: Sequence[Flattened | None],
    own: Flattened | None,
    put: StateDictPut,
    store_name: str,
) -> int:
    """Let all publishers put their parts. The script puts first, so that errors in its part are found first."""
    number = await _number_of(put.key, put.version, store_name, put.timeout)
    options = dataclasses.replace(put, state_dict=None, version=number)
    if publishers.script is not None:
        whole = dataclasses.replace(options, state_dict=own, publisher=publishers.script)
        await run(store_name, put.timeout, LocalClient.put_version, whole)
    calls = [
        actors.put_version.call(part, options, first, store_name)
        for (actors, first), part in zip(publishers.actors, parts, strict=True)
    ]
    _raise_of(*await _all_of(calls, put.timeout))
    return number


async def _all_of(calls: Sequence[Future[ValueMesh[T]]], timeout: float) -> list[ValueMesh[T]]:
    """The answers of the actors of all meshes. The error of one is raised after the others have answered, too."""
    answers: list[ValueMesh[T]] = []
    failed: Exception | None = None
    for call in calls:
        try:
            answers.append(await ask(call, timeout))
        except Exception as error:  # noqa: BLE001  # any error: it is raised below
            failed = failed or error
    if failed is not None:
        raise failed
    return answers


def _raise_of(*outcomes: ValueMesh[Refused | None]) -> None:
    """Raise the most informative error: if a rank was too late for a version, the reason is another rank's failure."""
    errors = [each for outcome in outcomes for each in outcome.values() if each is not None]
    if errors:
        raise next((each for each in errors if not isinstance(each, LateShareError)), errors[0])


async def _number_of(key: str, version: int | None, store_name: str, timeout: float) -> int:
    """The version that the ranks put. So they need not count puts, and a failed rank does not get out of step."""
    if version is not None:
        return version
    return await run(store_name, timeout, LocalClient.reserve, key, timeout=timeout)


def _actors_on(mesh: ProcMesh) -> ActorMesh[MeshPublisher]:
    processes = tuple(member.id for member in mesh.members)
    with _lock:
        actors = _actors.get(processes)
        if actors is None:
            actors = _actors.put(processes, mesh.spawn("torchstore_publishers", MeshPublisher))
    return actors


def _refuse_shards(key: str, mesh: ProcMesh) -> NoReturn:
    raise UnsupportedPlacementError(
        key,
        f"a tensor of {mesh!r} has a value on each rank, and it is unknown whether these are parts of a whole: make "
        "a DTensor of it (DTensor.from_local), or put that of one rank (tensor.slice_mesh(...)). If all ranks have the "
        "same, put_state_dict(..., verify_replicas=True) compares them",
    )


def _refuse_publisher(publisher: object) -> None:
    if publisher is not None:
        raise TypeError(
            "publisher= is for a process that puts its own tensors: for tensors of a mesh, the ranks are the publishers"
        )
