"""vLLM's weight transfer over the store, for vLLM 0.32 and 0.33: ``vllm/distributed/weight_transfer/base.py``.

A trainer publishes weights and controls the workers through vLLM's own client. Each worker joins the trainer's job and
reads only the elements that belong to its rank, by a plan that records what the model's own ``load_weights`` does.
`torchstore.adapters.register_vllm` registers both engines.
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
