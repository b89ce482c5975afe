"""Tensors by name, shared by the processes of a job: versions, resharding, weight sync at memory speed.

```python
import torchstore as ts

await ts.initialize()                                          # in the script
await ts.put_state_dict(model.state_dict(), "policy")          # in every trainer: its shards
await ts.get_state_dict("policy", generator.state_dict())      # in every generator: its own layout, in place
```
"""

from torchstore import sync as sync
from torchstore.api import (
    delete,
    delete_batch,
    exists,
    exists_batch,
    get,
    get_batch,
    get_meta,
    initialize,
    keys,
    put,
    put_batch,
    shutdown,
)
from torchstore.client import LocalClient
from torchstore.clients import DEFAULT_STORE_NAME, client, last_sync, reset_client, sync_history
from torchstore.errors import (
    BlockAlignmentError,
    BlockingCallError,
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
    MismatchError,
    OutOfStepError,
    PartiallyPublishedError,
    PublisherLostError,
    RankEnvironmentError,
    RendezvousError,
    ReplicaMismatchError,
    ShareDTypeMismatchError,
    ShareLayoutMismatchError,
    ShareMismatchError,
    SourceChangedError,
    StateDictMismatchError,
    StoreError,
    StoreNotInitializedError,
    StoreTimeoutError,
    StrategyError,
    UnsupportedPlacementError,
    VersionExistsError,
    VersionNotFoundError,
    VolumeFullError,
    VolumeLostError,
)
from torchstore.explanation import Explanation, Link
from torchstore.exporter import MetricsServer, serve_metrics
from torchstore.logging import init_logging
from torchstore.meta import TensorMeta, ValueMeta
from torchstore.metrics import metrics_text
from torchstore.naming import Part, Stack
from torchstore.origin import Origin
from torchstore.quantize import BlockFP8
from torchstore.ranks import SPMDEnv
from torchstore.records import SyncRecord
from torchstore.share import share_memory_
from torchstore.slices import TensorSlice
from torchstore.spmd import initialize_spmd
from torchstore.strategy import (
    ControllerStorageVolumes,
    HostStrategy,
    LocalRankStrategy,
    SingletonStrategy,
    TorchStoreStrategy,
)
from torchstore.weights import (
    explain,
    fence,
    get_state_dict,
    put_state_dict,
    rollback,
    versions,
    wait_for_readers,
)

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
    "Link",
    "Part",
    "Stack",
    "Origin",
    "wait_for_readers",
    "fence",
    "share_memory_",
    "BlockFP8",
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
    "SourceChangedError",
    "ChecksumError",
    "PublisherLostError",
    "VolumeLostError",
    "VolumeFullError",
    "JournalError",
    "ControllerLostError",
    "RankEnvironmentError",
    "RendezvousError",
    "StrategyError",
]
