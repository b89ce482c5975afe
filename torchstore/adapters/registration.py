"""Register this library's transports with vLLM and Ray. What they need is imported only when it is used."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

BACKEND = "torchstore"
"""The name of these engines in vLLM and verl."""


def register_vllm() -> None:
    """Register the weight transfer engine "torchstore" with vLLM, for workers and trainers.

    It enables ``weight_transfer_config={"backend": "torchstore"}``. It is an entry point of the group
    ``vllm.general_plugins``, which vLLM loads in each of its processes; a trainer must call it. Repeated calls do
    nothing.

    Raises:
        ImportError: vLLM is not installed, or older than its weight transfer engines for trainers.
    """
    factories: Any = import_module("vllm.distributed.weight_transfer.factory")
    for factory, class_name in (
        (factories.WeightTransferEngineFactory, "TorchStoreWeightTransferEngine"),
        (factories.WeightTransferTrainerFactory, "TorchStoreTrainerWeightTransferEngine"),
    ):
        with suppress(ValueError):  # it is registered already
            factory.register_engine(BACKEND, "skipper.torchstore.adapters.vllm", class_name)


def register_ray() -> None:
    """Register ``tensor_transport="skipper"`` with Ray, for tensors on CPUs and CUDA.

    Call it before you define classes whose methods use that transport: Ray's decorator looks it up. Repeated calls do
    nothing.

    Raises:
        ImportError: Ray is not installed, or older than its interface for custom transports.
    """
    experimental: Any = import_module("ray.experimental")
    transport: Any = import_module("skipper.torchstore.adapters.ray")
    with suppress(ValueError):  # it is registered already
        experimental.register_tensor_transport(
            transport.TRANSPORT, ["cpu", "cuda"], transport.TensorTransport, import_module("torch").Tensor
        )
