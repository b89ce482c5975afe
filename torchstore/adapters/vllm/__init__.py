"""vLLM's weight transfer over the store, for vLLM 0.32 and 0.33: ``vllm/distributed/weight_transfer/base.py``.

A trainer publishes and drives the workers through vLLM's own client; each worker joins the trainer's job and reads, of
what was published, the elements that belong to its rank, by a plan of what the model's own ``load_weights`` does with
them. `torchstore.adapters.register_vllm` makes both engines known.
"""

from skipper.torchstore.adapters.vllm.clients import PausingHTTPClient
from skipper.torchstore.adapters.vllm.messages import TorchStoreInitInfo, TorchStoreUpdateInfo
from skipper.torchstore.adapters.vllm.reading import UpdateRecord
from skipper.torchstore.adapters.vllm.sources import ShardSource
from skipper.torchstore.adapters.vllm.trainer import (
    SendRecord,
    TorchStoreTrainerInitInfo,
    TorchStoreTrainerWeightTransferEngine,
)
from skipper.torchstore.adapters.vllm.worker import TorchStoreWeightTransferEngine

__all__ = [
    "PausingHTTPClient",
    "SendRecord",
    "ShardSource",
    "TorchStoreInitInfo",
    "TorchStoreTrainerInitInfo",
    "TorchStoreTrainerWeightTransferEngine",
    "TorchStoreUpdateInfo",
    "TorchStoreWeightTransferEngine",
    "UpdateRecord",
]
