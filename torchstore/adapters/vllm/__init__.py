"""vLLM's weight transfer over the store; written against vLLM 0.33, ``vllm/distributed/weight_transfer/base.py``.

A trainer publishes and drives the workers through vLLM's own client; each worker joins the trainer's job, reads what
was published one-sidedly, and hands it to ``model.load_weights``. `torchstore.adapters.register_vllm` makes both
engines known.
"""

from skipper.torchstore.adapters.vllm.messages import TorchStoreInitInfo, TorchStoreUpdateInfo
from skipper.torchstore.adapters.vllm.trainer import TorchStoreTrainerInitInfo, TorchStoreTrainerWeightTransferEngine
from skipper.torchstore.adapters.vllm.worker import TorchStoreWeightTransferEngine

__all__ = [
    "TorchStoreInitInfo",
    "TorchStoreTrainerInitInfo",
    "TorchStoreTrainerWeightTransferEngine",
    "TorchStoreUpdateInfo",
    "TorchStoreWeightTransferEngine",
]
