"""The side of vLLM's workers: read what a trainer has published, have the model load it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from skipper import control
from skipper import torchstore as ts
from skipper.torchstore.adapters.vllm.messages import TorchStoreInitInfo, TorchStoreUpdateInfo
from skipper.torchstore.support.blocking import run


class TorchStoreWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM is not there to be typed
    """Reads each piece into memory of its own, and has the model load it.

    A worker of a pipeline reads only the weights of its own layers.
    """

    init_info_cls = TorchStoreInitInfo
    update_info_cls = TorchStoreUpdateInfo

    _connection: TorchStoreInitInfo | None = None

    def init_transfer_engine(self, init_info: TorchStoreInitInfo) -> None:
        """Join the trainer's job."""
        control.join(init_info.address, timeout=init_info.timeout)
        self._connection = init_info

    def start_weight_update(self) -> None:
        """Have the model take weights as a checkpoint has them, layer by layer."""
        _reload().initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Finish the layers."""
        _reload().finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: TorchStoreUpdateInfo) -> None:
        """Read one piece, when all trainer ranks have put it, and load it.

        Raises:
            RuntimeError: `init_transfer_engine` was not called.
            StoreError: It cannot be read: its trainer or its volume is dead, or it does not fit.
        """
        if self._connection is None:
            raise RuntimeError("init_transfer_engine has to be called before the first update")
        into = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
            if not self._is_of_another_stage(name)
        }
        if update_info.names and not into:
            return
        connection = self._connection
        run(
            lambda: ts.get_state_dict(
                update_info.key,
                into,
                strict=len(into) == len(update_info.names),
                names=_same,
                store_name=connection.store_name,
                version=("newer_than", update_info.version - 1),
                timeout=connection.timeout,
            )
        )
        with _part_of_a_model():
            self.model.load_weights(list(into.items()))

    def shutdown(self) -> None:
        """Let go of the store; the worker lives on, and leaves the job when it ends."""
        if self._connection is not None:
            ts.reset_client(self._connection.store_name)
            self._connection = None

    def _is_of_another_stage(self, name: str) -> bool:
        """Whether a weight belongs to a layer in whose place this worker has a stand-in: `load_weights` skips it."""
        if getattr(self.parallel_config, "pipeline_parallel_size", 1) == 1:
            return False
        models: Any = import_module("vllm.model_executor.models.utils")
        return bool(models.is_pp_missing_parameter(name, self.model))


def _same(name: str) -> str:
    """Names are the same on both sides; given as a function, what is asked for by no name is not read."""
    return name


def _reload() -> Any:
    return import_module("vllm.model_executor.model_loader.reload")


def _part_of_a_model() -> AbstractContextManager[None]:
    """While only some weights are loaded; versions of vLLM that check for all of them have a way to say so."""
    try:
        validation: Any = import_module("vllm.model_executor.model_loader.mtp_validation")
    except ImportError:
        return nullcontext()
    found: AbstractContextManager[None] = validation.disable_mtp_completeness_check()
    return found
