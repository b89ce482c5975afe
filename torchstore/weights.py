"""State dicts as versions: published by the ranks of one mesh, read into the layout of another.

Each function takes ``store_name`` and ``timeout`` as those of `torchstore.api` do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skipper.control.model.bounds import check_flag
from skipper.torchstore.algebra.manifest import Mode
from skipper.torchstore.clients import mesh_publishers
from skipper.torchstore.clients.explanation import Explanation
from skipper.torchstore.clients.local_client import LocalClient
from skipper.torchstore.clients.registry import DEFAULT_STORE_NAME, run
from skipper.torchstore.clients.remote import DEFAULT_TIMEOUT_S
from skipper.torchstore.clients.requests import StateDictGet, StateDictPut, VersionSelector
from skipper.torchstore.clients.staging import TransferDtype
from skipper.torchstore.protocol.origin import Origin
from skipper.torchstore.support.coroutines import public
from skipper.torchstore.tensors.certifying import Certify
from skipper.torchstore.tensors.naming import NameMap


@public
async def put_state_dict(
    state_dict: Mapping[Any, Any] | None,
    key: str,
    store_name: str = DEFAULT_STORE_NAME,
    direct_rdma: bool = False,
    transfer_dtype: TransferDtype | None = None,
    *,
    mode: Mode | None = None,
    version: int | None = None,
    keep: int | None = None,
    checksum: bool | None = None,
    delta: bool = False,
    publisher: Origin | tuple[int, int] | None = None,
    verify_replicas: bool = False,
    copies: int | None = None,
    certify: Certify | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> int:
    """Publish this rank's part of a state dict as one version, which becomes visible completely or not at all.

    Args:
        state_dict: Nested dicts (lists, tuples) of tensors, DTensors and picklable objects. Ranks of one mesh put the
            same names; each contributes its shards. A script can put tensors of meshes of the tensor engine in the same
            way: DTensors, and along with those of a mesh, tensors that are the same on all its ranks. The ranks put
            these, as they are at this point of the program, and this process puts the rest. In direct mode, None means
            the one that this process has put last under ``key``, with its ``transfer_dtype``: the same tensors, with
            their present values. With a ``transfer_dtype``, the store does not keep these tensors alive.
        key: The key to put it under.
        store_name: Name of the store.
        direct_rdma: The older name of ``mode="direct"``.
        mode: "snapshot" (the default) copies into a storage volume, and the version outlives this process.
            "direct" copies nothing: readers read the bytes of these tensors, which must stay alive and unchanged until
            `fence` (or `wait_for_readers`) returns, when they are no longer read.
        version: A number higher than those before; by default the next one. Ranks that give none are matched by order:
            the n-th put of this key by each rank of the group belongs to step n.
        keep: How many ready versions of this key stay readable from now on, in addition to those that are being read;
            None: as many as before, at first the number that `initialize` was given. In direct mode a publisher's
            memory holds one version, for any ``keep``.
        transfer_dtype: Convert floating-point tensors to this dtype and store them so: ``torch.bfloat16`` halves the
            size of float32 weights. `BlockFP8()`, `MXFP8()` and `NVFP4()` quantize matrices to 8 or 4 bits with a scale
            for each block, stored as ``NAME_scale_inv`` or ``NAME_scale``; readers read these tensors, or the
            dequantized values into tensors of a wider dtype. In direct mode readers then read converted copies of all
            tensors, which this process keeps; the put waits until the previous copies are no longer read, and you may
            change the tensors when it returns, without a `fence`.
        checksum: Compute a checksum of each cell (about 4,096 elements) of the tensors before they are copied or
            offered; every reader computes the checksums of what has arrived and compares them. None: as `initialize`
            was told.
        delta: Snapshot mode: compare with the last version that this process put with ``delta=True``, which is read
            from its volume for that, and publish which cells differ.
        publisher: (index, count), or an `Origin`, which also names the group: this is one of ``count`` processes that
            each put a part of the version, with any tensors: stages of a pipeline, for example. The version is complete
            when all have put and every tensor is covered. None: all ranks of the process group put; ranks without
            tensors put an empty state dict. A state dict without DTensors is then a whole version, of which the other
            ranks may put replicas. Outside of a process group each process publishes alone.
        verify_replicas: Wait for all ranks of the group, and compare the checksums of equal boxes. All ranks give the
            same value.
        copies: Snapshot mode: in how many volumes each rank's part is stored: with 2, in its own and in another one, on
            another host if there is one, and the version survives the loss of any one volume (and host). Readers read
            any copy, and another one when a volume is lost. None: as `initialize` was told, and 1 with ``delta=True``.
        certify: Hash the tensors as they are stored, tile by tile, before they are copied or offered: `certificate`
            then returns what `prove` compares a model with. All ranks give the same value. A tuple of dtypes,
            ``(torch.bfloat16,)``, also certifies floating-point tensors in these dtypes: those that readers convert
            them to, and the values of tensors that `BlockFP8` quantizes. None: as `initialize` was told.
        timeout: In seconds.

    Returns:
        The version's number. Other ranks may not have put their parts yet.

    Raises:
        VersionExistsError: That version is ready already, or a newer one is.
        LateShareError: The step was given up: a rank has died or was started again, or a newer version is complete.
        OutOfStepError: The last put of this rank failed, or other ranks are far behind.
        ShareMismatchError: The shares of the step do not fit together.
        ReplicaMismatchError: ``verify_replicas``: two ranks hold different bytes of one box.
        RendezvousError: The process group's own store is gone.
        TypeError: An argument has the wrong type (``direct_rdma`` is True or False, for example, and not a dtype); or
            ``publisher`` is given for tensors of meshes.
        ValueError: None was given for a state dict, and this process has put none under ``key`` in direct mode, or the
            memory of one of its tensors has been freed since; or ``direct_rdma=True`` and ``mode="snapshot"``.
        MismatchError: A tensor cannot be stored; `BlockAlignmentError`: its shards cut the blocks in which it would be
            quantized.
        UnsupportedPlacementError: (a MismatchError) It has only tensors of a mesh that do not say whether the ranks
            hold parts of a whole or replicas.
        MeshMismatchError, StreamMismatchError: (`ValueError`s) Two meshes of the tensor engine share processes, or
            tensors of one are of several streams.
        SupervisionError: A rank of a mesh has died. The parts that other ranks have put never become visible.
        VolumeLostError: The storage volume is dead; with ``copies``: too few volumes are alive.
        StrategyError: The store has fewer volumes than ``copies``.
    """
    put = StateDictPut(
        state_dict,
        key,
        _mode(mode, direct_rdma),
        version,
        keep,
        transfer_dtype,
        checksum,
        delta,
        publisher,
        verify_replicas,
        copies,
        certify,
        timeout,
    )
    number = await mesh_publishers.put_version(put, store_name)
    return await run(store_name, timeout, LocalClient.put_version, put) if number is None else number


@public
async def get_state_dict(
    key: str,
    user_state_dict: Mapping[Any, Any] | None = None,
    strict: bool = True,
    store_name: str = DEFAULT_STORE_NAME,
    direct_rdma: bool = False,
    *,
    names: NameMap | None = None,
    version: VersionSelector = "latest",
    delta: bool = False,
    serve: bool = False,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> dict[Any, Any]:
    """Read one version of a state dict, into the tensors of ``user_state_dict`` if there are any.

    Args:
        key: The key of the state dict.
        user_state_dict: Its tensors are filled in place; DTensors get their own shard, in any layout. Names are
            compared as `put_state_dict` flattens them. Tensors of a mesh of the tensor engine are refused: pass them to
            an endpoint of actors on that mesh, which reads into its arguments.
        strict: Raise if the names of the two state dicts differ. Otherwise everything that is stored is read: into the
            given tensor if there is one, else into a new one.
        store_name: Name of the store.
        direct_rdma: Accepted but not needed: a version knows where its bytes are.
        names: If the names of the two sides differ: a function of a name of ``user_state_dict``. It returns the stored
            name, a `Part` of a stored tensor, a `Stack` of several (fused projections), or None if nothing is read for
            this name. Give the same function each time, with the same results: the plan depends on it. ``strict`` then
            raises if something is stored that no name asks for; otherwise that is not read.
        version: "latest", a number, or ("newer_than", number), which waits for the next version.
        delta: You promise that nothing has written to these tensors since your last ``get_state_dict(key, ...,
            delta=True)``. If they hold the version before the one that is read, and it was put with ``delta=True``,
            only the cells that differ are read; in any doubt everything is read. With checksums (``put_state_dict(...,
            checksum=True)``) the promise is also verified, and a broken one costs a full read.
        serve: Offer these tensors, after the read, to other readers of the same boxes that also give ``serve=True``,
            and read from theirs: the publishers then serve one reader of each kind. You promise not to change them
            until your next `get_state_dict` of this key (which withdraws the offer), or `fence`. If a copy is gone or
            withdrawn, its readers read from the publishers. With ``names``, readers serve each other if their tensors
            are made of the same parts.
        timeout: In seconds, including the wait for a version.

    Returns:
        The state dict, nested as it was put (with ``names``: as it was given), with the given tensors.

    Raises:
        KeyNotFoundError: There is no such key or version.
        PartiallyPublishedError: No version is complete yet.
        StoreTimeoutError: ("newer_than", n): no such version came in time.
        CoverageError, DTypeMismatchError, LayoutMismatchError, StateDictMismatchError: The two do not fit;
            found before the first byte was moved.
        SourceChangedError: Direct mode, exact version: its publisher has withdrawn it.
        PublisherLostError: Direct mode: the publisher is dead.
        VolumeLostError: Snapshot mode: the volume is dead, and there is no other copy.
        ChecksumError: It was put with ``checksum=True``, and the bytes that arrived are not the same.
        TypeError: An argument has the wrong type (``strict`` is True or False, for example, and not a name).
    """
    check_flag("direct_rdma", direct_rdma)
    get = StateDictGet(key, user_state_dict, version, strict, names, delta, serve, timeout)
    mesh_publishers.refuse_destination(key, user_state_dict)
    return await run(store_name, timeout, LocalClient.get_version, get)


@public
async def explain(
    key: str,
    user_state_dict: Mapping[Any, Any] | None = None,
    strict: bool = True,
    store_name: str = DEFAULT_STORE_NAME,
    *,
    names: NameMap | None = None,
    version: VersionSelector = "latest",
    delta: bool = False,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> Explanation:
    """What `get_state_dict` with these arguments would do: bytes for each link, segments, time; it moves no bytes.

    The plan is kept, so that a later read can use it.

    Raises:
        KeyNotFoundError, CoverageError, MismatchError: As `get_state_dict` would.
    """
    get = StateDictGet(key, user_state_dict, version, strict, names, delta, timeout=timeout)
    mesh_publishers.refuse_destination(key, user_state_dict)
    return await run(store_name, timeout, LocalClient.explain_get, get)


@public
async def versions(
    key: str, *, store_name: str = DEFAULT_STORE_NAME, timeout: float = DEFAULT_TIMEOUT_S
) -> tuple[int, ...]:
    """The versions of a key that can be read, oldest first; none for an unknown key."""
    return await run(store_name, timeout, LocalClient.versions, key, timeout=timeout)


@public
async def rollback(
    key: str, version: int, *, store_name: str = DEFAULT_STORE_NAME, timeout: float = DEFAULT_TIMEOUT_S
) -> None:
    """Make a kept version the latest again, and delete those after it. Reads that have begun can finish.

    Their numbers are not used again: the next put makes a version newer than all that ever existed. Do it while no
    process puts: parts that only some ranks of a mesh have put are deleted too.

    Raises:
        KeyNotFoundError: There is no such key, or the version is not kept.
        SourceChangedError: Direct mode: its publisher has withdrawn it.
    """
    await run(store_name, timeout, LocalClient.rollback, key, version, timeout=timeout)


@public
async def fence(key: str, *, store_name: str = DEFAULT_STORE_NAME, timeout: float = DEFAULT_TIMEOUT_S) -> None:
    """Direct mode: withdraw the published version, and return when the tensors may be written again.

    A reader that offers its copy (``serve=True``) withdraws it in the same way.

    After the call no read of the version can begin: a reader that asks for the latest one waits for the next. The call
    returns when the reads that had begun are done. A reader that is late nevertheless gets `SourceChangedError`, and
    never a mixture of two versions.

    Raises:
        StoreTimeoutError: A process is still reading; the message names the processes. The version stays withdrawn.
    """
    if not await mesh_publishers.fence(key, store_name, timeout):
        await run(store_name, timeout, LocalClient.fence, key, timeout=timeout)


@public
async def wait_for_readers(
    key: str, *, store_name: str = DEFAULT_STORE_NAME, timeout: float = DEFAULT_TIMEOUT_S
) -> None:
    """Direct mode: wait until no process reads what this process has published under ``key``.

    New readers may come at any time; `fence` excludes them as well.

    Raises:
        StoreTimeoutError: A process is still reading; the message names the processes.
    """
    if not await mesh_publishers.wait_for_readers(key, store_name, timeout):
        await run(store_name, timeout, LocalClient.wait_for_readers, key, timeout=timeout)


def _mode(mode: Mode | None, direct_rdma: bool) -> Mode:
    """The mode that ``mode`` and ``direct_rdma`` say.

    Raises:
        TypeError: ``direct_rdma`` must be True or False.
        ValueError: They contradict each other.
    """
    if not check_flag("direct_rdma", direct_rdma):
        return mode or "snapshot"
    if mode == "snapshot":
        raise ValueError("direct_rdma=True means mode='direct', but mode='snapshot' was given: pass only one of them")
    return "direct"
