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
    """Publish this rank's part of a state dict as one version, which becomes visible whole or not at all.

    Args:
        state_dict: Nested dicts (lists, tuples) of tensors, DTensors and picklable objects. Ranks of one
            mesh put the same names; each contributes its shards. A script puts tensors of meshes of the tensor engine
            just so: DTensors, and beside those of a mesh, tensors of which all its ranks have the same. The ranks put
            them, as they are at this point of the program, and this process what else there is. In direct mode None
            stands for the one that this process has put last under ``key``, with its ``transfer_dtype``: the same
            tensors, as they are now. With a ``transfer_dtype`` they are not kept alive for that.
        key: Where.
        store_name: Which store.
        direct_rdma: The older name of ``mode="direct"``.
        mode: "snapshot" (the default) copies into a storage volume, and the version outlives this process.
            "direct" copies nothing: readers take the bytes from these tensors, which must stay alive and
            unchanged until `fence` (or `wait_for_readers`) says that nobody reads them any more.
        version: A number higher than those before; by default the next one. Ranks that give none are matched by order:
            the n-th put of this key by each rank of the group belongs to step n.
        keep: How many ready versions of this key stay readable from now on, in addition to those that are being read;
            None: as many as before, at first as many as `initialize` said. In direct mode a publisher's memory
            holds one version, whatever is kept.
        transfer_dtype: Store floating-point tensors as this dtype, converted on their way: ``torch.bfloat16`` halves
            what float32 weights cost. `BlockFP8()`, `MXFP8()` and `NVFP4()` quantize matrices to 8 or 4 bits with a
            scale for each block, stored as ``NAME_scale_inv`` or ``NAME_scale``; readers take these tensors, or the
            values into tensors of a wider dtype. In direct mode readers then read converted copies of all tensors,
            which this process keeps; the put waits until nobody reads the last ones any more, and the tensors
            themselves are free again when it returns, without a `fence`.
        checksum: Take a sum of each cell (some 4,096 elements) of the tensors before they are copied or offered;
            every reader takes the sums of what has arrived and compares. None: as `initialize` said.
        delta: Snapshot mode: compare with the last version that this process put with ``delta=True``, which is read
            from its volume for that, and publish which cells differ.
        publisher: (index, count), or an `Origin`, which names the group too: this is one of ``count`` processes that
            put a part of the version each, whatever tensors these are: stages of a pipeline, say. The version is whole
            when all have put and every tensor is covered. None: all ranks of the process group put, those that have
            nothing to give an empty state dict; and a state dict without DTensors is all of a version, of which the
            other ranks may put replicas. Outside of a process group each process publishes alone.
        verify_replicas: Wait for all ranks of the group, and compare the sums of equal boxes, which are taken for that.
            All ranks say the same.
        copies: Snapshot mode: in how many volumes each rank's part is stored: with 2 in its own and in a neighbour's,
            on another host where there is one, and the version survives the loss of any one volume (and host). Readers
            take any copy, and another when a volume is gone. None: as `initialize` said, and 1 with ``delta=True``.
        certify: Hash the tensors as they are stored, tile by tile, before they are copied or offered: `certificate`
            then has what `prove` compares a model with. All ranks say the same. A tuple of dtypes,
            ``(torch.bfloat16,)``, certifies floating-point tensors in these as well: what readers convert them to, and
            the values of those that `BlockFP8` quantizes. None: as `initialize` said.
        timeout: In seconds.

    Returns:
        The version's number. Other ranks may not have put their parts yet.

    Raises:
        VersionExistsError: That version is ready already, or a newer one is.
        LateShareError: The step was given up: a rank has died or was started again, or a newer version is whole.
        OutOfStepError: The last put of this rank failed, or other ranks are far behind.
        ShareMismatchError: The shares of the step do not fit together.
        ReplicaMismatchError: ``verify_replicas``: two ranks hold different bytes of one box.
        RendezvousError: The process group's own store is gone.
        TypeError: An argument is of another type: ``direct_rdma`` is True or False, for instance, and no dtype; or
            ``publisher`` is given for tensors of meshes.
        ValueError: None was given for a state dict, and this process has put none under ``key`` in direct mode, or the
            memory of a tensor of that has been freed since; or ``direct_rdma=True`` and ``mode="snapshot"``.
        MismatchError: A tensor cannot be stored; `BlockAlignmentError`: its shards cut the blocks in which it is to be
            quantized.
        UnsupportedPlacementError: (a MismatchError) Of a mesh there are only tensors of which nothing says what those
            of the ranks have to do with each other.
        MeshMismatchError, StreamMismatchError: (`ValueError`s) Two meshes of the tensor engine share processes, or
            tensors of one are of several streams.
        SupervisionError: A rank of a mesh has died. What the others have put of this version never becomes visible.
        VolumeLostError: The storage volume is dead; with ``copies``: there are not as many living ones.
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
    """Read one version of a state dict, into the tensors of ``user_state_dict`` where there are some.

    Args:
        key: As it was put.
        user_state_dict: Its tensors are filled in place; DTensors take their own shard, in whatever layout.
            Names are compared as `put_state_dict` flattens them. Tensors of a mesh of the tensor engine are refused:
            an actor of that mesh reads into those that are arguments of its endpoint.
        strict: Refuse when the names of the two state dicts differ. Otherwise what is stored is read: into
            the given tensor where there is one, into a new one where there is none.
        store_name: Which store.
        direct_rdma: Accepted and not needed: a version knows where its bytes are.
        names: Where the names of the two sides differ, a function of a name of ``user_state_dict``. It answers with
            the stored name, a `Part` of a stored tensor, a `Stack` of several (fused projections), or None for what
            is not to be read. Give the same function each time, and let it answer the same: a plan rests on it.
            ``strict`` then refuses what is stored and is asked for by no name; otherwise that is not read.
        version: "latest", a number, or ("newer_than", number), which waits for the next version.
        delta: You promise that since your last ``get_state_dict(key, ..., delta=True)`` nobody has written to these
            tensors. If they hold the version before the one that is read, and it was put with ``delta=True``, only
            the cells that differ are read; in any doubt everything is. With checksums (``put_state_dict(...,
            checksum=True)``) the promise is proved too, and a broken one costs a full read.
        serve: Offer these tensors, as they are after the read, to other readers of the same boxes who give
            ``serve=True`` too, and read from theirs: the publishers then feed one reader of each kind. You promise to
            leave them alone until your next `get_state_dict` of this key (which takes the offer back), or `fence`.
            Where a copy is gone or taken back, its readers read from the publishers. With ``names``
            those feed each other whose tensors are made of the same parts.
        timeout: In seconds, the wait for a version included.

    Returns:
        The state dict, nested as it was put (with ``names``: as it was given), holding the given tensors.

    Raises:
        KeyNotFoundError: No such key or version.
        PartiallyPublishedError: No version is whole yet.
        StoreTimeoutError: ("newer_than", n): no such version in time.
        CoverageError, DTypeMismatchError, LayoutMismatchError, StateDictMismatchError: The two do not fit;
            found before the first byte was moved.
        SourceChangedError: Direct mode, exact version: its publisher took it back.
        PublisherLostError: Direct mode: the publisher is dead.
        VolumeLostError: Snapshot mode: the volume is dead, and there is no other copy.
        ChecksumError: It was put with ``checksum=True``, and something else has arrived.
        TypeError: An argument is of another type: ``strict`` is True or False, for instance, and no name.
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
    """What `get_state_dict` with these arguments would do: bytes for each link, segments, time; moves nothing.

    The plan that it makes is kept: a read that follows finds it.

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
    """Make a kept version the latest again, and forget those after it. Reads that have begun are finished.

    Their numbers are not used again: the next put makes a version newer than all that ever were. Do it while
    nobody puts: what some ranks of a mesh have put and others have not is forgotten too.

    Raises:
        KeyNotFoundError: There is no such key, or the version is not kept.
        SourceChangedError: Direct mode: its publisher has taken it back.
    """
    await run(store_name, timeout, LocalClient.rollback, key, version, timeout=timeout)


@public
async def fence(key: str, *, store_name: str = DEFAULT_STORE_NAME, timeout: float = DEFAULT_TIMEOUT_S) -> None:
    """Direct mode: take the published version back, and return when the tensors may be written again.

    A reader that offers its copy (``serve=True``) takes it back in the same way.

    From the call on, nobody can begin to read the version: a reader that asks for the latest one waits for the next.
    The call returns when the reads that had begun are done. A reader that is late all the same finds the
    seal broken. It gets `SourceChangedError`, never a mixture of two versions.

    Raises:
        StoreTimeoutError: Somebody still reads; the message names the processes. The version stays closed.
    """
    if not await mesh_publishers.fence(key, store_name, timeout):
        await run(store_name, timeout, LocalClient.fence, key, timeout=timeout)


@public
async def wait_for_readers(
    key: str, *, store_name: str = DEFAULT_STORE_NAME, timeout: float = DEFAULT_TIMEOUT_S
) -> None:
    """Direct mode: wait until nobody reads what this process has published under ``key``.

    New readers may come at any moment; `fence` keeps them away as well.

    Raises:
        StoreTimeoutError: Somebody still reads; the message names the processes.
    """
    if not await mesh_publishers.wait_for_readers(key, store_name, timeout):
        await run(store_name, timeout, LocalClient.wait_for_readers, key, timeout=timeout)


def _mode(mode: Mode | None, direct_rdma: bool) -> Mode:
    """What the two ways to say it mean.

    Raises:
        TypeError: ``direct_rdma`` must be True or False.
        ValueError: They contradict each other.
    """
    if not check_flag("direct_rdma", direct_rdma):
        return mode or "snapshot"
    if mode == "snapshot":
        raise ValueError("direct_rdma=True means mode='direct', but mode='snapshot' was given: pass only one of them")
    return "direct"
