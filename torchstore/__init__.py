"""Tensors by name, shared by the processes of a job: versions, resharding, weight sync at memory speed.

```python
from skipper import torchstore as ts

await ts.initialize()                                          # in the script
await ts.put_state_dict(model.state_dict(), "policy")          # in every trainer: its shards
await ts.get_state_dict("policy", generator.state_dict())      # in every generator: its own layout, in place
```
"""

if __name__ != "skipper.torchstore":  # imported by the folder's own name, as a second copy of the package
    raise ImportError("write `from skipper import torchstore`, or `from skipper.torchstore import ...`", name=__name__)


from skipper.torchstore import sync as sync
from skipper.torchstore.algebra.slices import TensorSlice
from skipper.torchstore.api import (
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
from skipper.torchstore.clients.explanation import Explanation, ReadLink
from skipper.torchstore.clients.local_client import LocalClient
from skipper.torchstore.clients.registry import DEFAULT_STORE_NAME, client, last_sync, reset_client, sync_history
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
from skipper.torchstore.lora.adapter import BaseVersion, LoRAAdapter, lora_adapter_of
from skipper.torchstore.lora.merging import LoRAMerger
from skipper.torchstore.lora.sync import get_lora, put_lora
from skipper.torchstore.peers.shared_parameters import share_memory_
from skipper.torchstore.plans.load_plan import LoadPlan
from skipper.torchstore.plans.recorder import record_plan
from skipper.torchstore.plans.replay import load_by_plan
from skipper.torchstore.proofs.certificate import Certificate
from skipper.torchstore.proofs.proof import Proof, join_proofs
from skipper.torchstore.proofs.prove import prove
from skipper.torchstore.proofs.stored import certificate
from skipper.torchstore.protocol.meta import TensorMeta, ValueMeta
from skipper.torchstore.protocol.origin import Origin
from skipper.torchstore.protocol.strategy import (
    ControllerStorageVolumes,
    HostStrategy,
    LocalRankStrategy,
    SingletonStrategy,
    TorchStoreStrategy,
)
from skipper.torchstore.spmd.rank_store import initialize_spmd
from skipper.torchstore.spmd.ranks import SPMDEnv
from skipper.torchstore.support.metrics import MetricsServer, metrics_text, serve_metrics
from skipper.torchstore.support.records import SyncRecord
from skipper.torchstore.tensors.block_fp8 import BlockFP8
from skipper.torchstore.tensors.microscaling import MXFP8, NVFP4, peaks_of
from skipper.torchstore.tensors.naming import Part, Stack
from skipper.torchstore.weights import (
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
