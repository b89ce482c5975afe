"""The store for code without an event loop: each function of `torchstore`, by the same name, waits for its result.

```python
from skipper.torchstore import sync as ts

ts.initialize()
ts.put("weights", tensor)
ts.get("weights", mine)
ts.shutdown()
```

They have the arguments and results of those of `torchstore`, and raise the same errors. They are for plain scripts, for
threads, for the cells of a notebook and for actors with sync endpoints. On the event loop of an ``async`` actor they
would block everything else, so they raise `BlockingCallError`: there, await the function of `torchstore`.

All of them run as coroutines on one event loop in a thread of this process, which is started by the first call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine

from skipper.control.api.coroutine_thread import is_on_actors_loop
from skipper.torchstore import api, weights
from skipper.torchstore.algebra.slices import TensorSlice
from skipper.torchstore.clients import registry as clients
from skipper.torchstore.clients.explanation import Explanation, ReadLink
from skipper.torchstore.clients.local_client import LocalClient
from skipper.torchstore.clients.registry import DEFAULT_STORE_NAME, last_sync, reset_client, sync_history
from skipper.torchstore.errors import (
    AdapterBaseMismatchError,
    BlockAlignmentError,
    BlockingCallError,
    CertificateFormatError,
    ChecksumError,
    ControllerLostError,
    CoverageError,
    DestinationOverlapError,
    DTypeMismatchError,
    JournalError,
    KeyNotFoundError,
    KindMismatchError,
    LateShareError,
    LayoutMismatchError,
    LoadPlanFormatError,
    LoadPlanMismatchError,
    MirrorDamagedError,
    MirrorError,
    MirrorFormatError,
    MirrorRolledBackError,
    MirrorSignatureError,
    MirrorUnreachableError,
    MismatchError,
    NotCertifiedError,
    OutOfStepError,
    PartiallyPublishedError,
    ProofError,
    PublisherLostError,
    RankEnvironmentError,
    RecordingError,
    ReplicaMismatchError,
    SecondSetError,
    ShareDTypeMismatchError,
    ShareLayoutMismatchError,
    ShareMismatchError,
    SourceChangedError,
    StateDictMismatchError,
    StoreError,
    StoreNotInitializedError,
    StoreRendezvousError,
    StoreTimeoutError,
    StrategyError,
    UnsupportedPlacementError,
    VersionExistsError,
    VersionNotFoundError,
    VolumeFullError,
    VolumeLostError,
)
from skipper.torchstore.logging import init_logging
from skipper.torchstore.lora import sync as lora_sync
from skipper.torchstore.lora.adapter import BaseVersion, LoRAAdapter, lora_adapter_of
from skipper.torchstore.lora.merging import LoRAMerger
from skipper.torchstore.peers.shared_parameters import share_memory_
from skipper.torchstore.plans import replay
from skipper.torchstore.plans.load_plan import LoadPlan
from skipper.torchstore.plans.recorder import record_plan
from skipper.torchstore.proofs import stored
from skipper.torchstore.proofs.certificate import Certificate
from skipper.torchstore.proofs.proof import Proof, join_proofs
from skipper.torchstore.proofs.prove import prove
from skipper.torchstore.protocol.meta import TensorMeta, ValueMeta
from skipper.torchstore.protocol.origin import Origin
from skipper.torchstore.protocol.strategy import (
    ControllerStorageVolumes,
    HostStrategy,
    LocalRankStrategy,
    SingletonStrategy,
    TorchStoreStrategy,
)
from skipper.torchstore.spmd import rank_store
from skipper.torchstore.spmd.ranks import SPMDEnv
from skipper.torchstore.support.blocking import run as _run
from skipper.torchstore.support.coroutines import P, R
from skipper.torchstore.support.metrics import MetricsServer, metrics_text, serve_metrics
from skipper.torchstore.support.records import SyncRecord
from skipper.torchstore.tensors.block_fp8 import BlockFP8
from skipper.torchstore.tensors.microscaling import MXFP8, NVFP4, peaks_of
from skipper.torchstore.tensors.naming import Part, Stack
from skipper.torchstore.tensors.stream_order import settle


def _blocking(function: Callable[P, Coroutine[object, object, R]], *, begins_job: bool = False) -> Callable[P, R]:
    """The function of `torchstore`, as one that waits."""

    @functools.wraps(function, updated=())  # an attribute of the function may say that it is a coroutine function
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_on_actors_loop():
            raise BlockingCallError(function.__name__)
        settle((args, kwargs))
        return _run(lambda: function(*args, **kwargs), name=function.__name__, begins_job=begins_job)

    call.__module__ = __name__
    return call


initialize = _blocking(api.initialize, begins_job=True)
shutdown = _blocking(api.shutdown)
put = _blocking(api.put)
put_batch = _blocking(api.put_batch)
get = _blocking(api.get)
get_batch = _blocking(api.get_batch)
delete = _blocking(api.delete)
delete_batch = _blocking(api.delete_batch)
keys = _blocking(api.keys)
exists = _blocking(api.exists)
exists_batch = _blocking(api.exists_batch)
get_meta = _blocking(api.get_meta)
put_state_dict = _blocking(weights.put_state_dict)
get_state_dict = _blocking(weights.get_state_dict)
put_lora = _blocking(lora_sync.put_lora)
get_lora = _blocking(lora_sync.get_lora)
load_by_plan = _blocking(replay.load_by_plan)
certificate = _blocking(stored.certificate)
explain = _blocking(weights.explain)
versions = _blocking(weights.versions)
rollback = _blocking(weights.rollback)
fence = _blocking(weights.fence)
wait_for_readers = _blocking(weights.wait_for_readers)
client = _blocking(clients.client)
initialize_spmd = _blocking(rank_store.initialize_spmd)

__all__ = [
    # a store
    "initialize",
    "initialize_spmd",
    "SPMDEnv",
    "shutdown",
    "client",
    "reset_client",
    "LocalClient",
    "DEFAULT_STORE_NAME",
    "init_logging",
    # values
    "put",
    "put_batch",
    "get",
    "get_batch",
    "delete",
    "delete_batch",
    "keys",
    "exists",
    "exists_batch",
    "get_meta",
    "TensorMeta",
    "ValueMeta",
    "TensorSlice",
    # state dicts and versions
    "put_state_dict",
    "get_state_dict",
    "versions",
    "rollback",
    "explain",
    "Explanation",
    "ReadLink",
    "Part",
    "Stack",
    "Origin",
    "record_plan",
    "load_by_plan",
    "LoadPlan",
    "certificate",
    "Certificate",
    "prove",
    "join_proofs",
    "Proof",
    "wait_for_readers",
    "fence",
    "share_memory_",
    "BlockFP8",
    "MXFP8",
    "NVFP4",
    "peaks_of",
    "lora_adapter_of",
    "put_lora",
    "get_lora",
    "LoRAAdapter",
    "LoRAMerger",
    "BaseVersion",
    "last_sync",
    "sync_history",
    "metrics_text",
    "serve_metrics",
    "MetricsServer",
    "SyncRecord",
    # which volume
    "TorchStoreStrategy",
    "ControllerStorageVolumes",
    "SingletonStrategy",
    "HostStrategy",
    "LocalRankStrategy",
    # errors
    "StoreError",
    "StoreNotInitializedError",
    "StoreTimeoutError",
    "KeyNotFoundError",
    "VersionNotFoundError",
    "PartiallyPublishedError",
    "VersionExistsError",
    "LateShareError",
    "OutOfStepError",
    "MismatchError",
    "AdapterBaseMismatchError",
    "LayoutMismatchError",
    "UnsupportedPlacementError",
    "BlockAlignmentError",
    "BlockingCallError",
    "DestinationOverlapError",
    "CoverageError",
    "DTypeMismatchError",
    "KindMismatchError",
    "StateDictMismatchError",
    "ShareMismatchError",
    "ShareDTypeMismatchError",
    "ShareLayoutMismatchError",
    "ReplicaMismatchError",
    "LoadPlanMismatchError",
    "LoadPlanFormatError",
    "RecordingError",
    "SecondSetError",
    "SourceChangedError",
    "ChecksumError",
    "NotCertifiedError",
    "ProofError",
    "CertificateFormatError",
    "PublisherLostError",
    "VolumeLostError",
    "VolumeFullError",
    "JournalError",
    "MirrorError",
    "MirrorFormatError",
    "MirrorSignatureError",
    "MirrorRolledBackError",
    "MirrorDamagedError",
    "MirrorUnreachableError",
    "ControllerLostError",
    "RankEnvironmentError",
    "StoreRendezvousError",
    "StrategyError",
]
