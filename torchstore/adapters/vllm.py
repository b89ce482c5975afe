"""vLLM's weight transfer over the store; written against vLLM 0.33, ``vllm/distributed/weight_transfer/base.py``.

A trainer publishes under one key and drives the workers through vLLM's own client; each worker joins the trainer's job,
reads what was published one-sidedly, and hands it to ``model.load_weights``. `register_vllm` makes both engines known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

import control
import torchstore as ts
from torchstore.adapters.blocking import run
from torchstore.adapters.buckets import buckets
from torchstore.adapters.registration import BACKEND
from torchstore.adapters.shards import as_dtensors, is_shared_by

Weights = dict[str, torch.Tensor]


@dataclass
class TorchStoreInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not there to be typed
    """What a worker is told once, by the trainer.

    Attributes:
        address: The trainer's job, as `control.join` takes it: a path, never a secret.
        store_name: Which store.
        timeout: Bound on each step, in seconds.
    """

    address: str
    store_name: str
    timeout: float = 600.0


@dataclass
class TorchStoreUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What a worker is told of one piece of an update; all of it fits into JSON.

    Attributes:
        key: Where it was put.
        version: Which version of that.
        names: Of the weights.
        dtype_names: Theirs, as in ``"bfloat16"``.
        shapes: Of the whole weights.
    """

    key: str
    version: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError(
                f"{len(self.names)} names, {len(self.dtype_names)} dtypes and {len(self.shapes)} shapes of weights"
            )


class TorchStoreWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """The worker's side: reads each piece into memory of its own, and has the model load it."""

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
        }
        reading = ts.get_state_dict(
            update_info.key,
            into,
            store_name=self._connection.store_name,
            version=("newer_than", update_info.version - 1),
            timeout=self._connection.timeout,
        )
        run(reading)
        with _part_of_a_model():
            self.model.load_weights(list(into.items()))

    def shutdown(self) -> None:
        """Let go of the store; the worker lives on, and leaves the job when it ends."""
        if self._connection is not None:
            ts.reset_client(self._connection.store_name)
            self._connection = None


@dataclass
class TorchStoreTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """What the trainer's engine needs to know; the same on every trainer rank, but for ``rank``.

    Attributes:
        num_trainer_ranks: How many trainer ranks there are.
        address: The job whose store is used; None: that of rank 0's own process, which is then served.
        store_name: A store that the trainer has initialized (`initialize`, or `initialize_spmd` under torchrun).
        key: Prefix of the keys that are written.
        mode: "direct" has workers read the trainer's own memory, which costs no copy; "snapshot" copies it into a
            volume first. Whole tensors that a source gathers are always copied, bucket by bucket.
        bucket_nbytes: How many bytes of whole tensors are gathered at a time.
        timeout: Bound on each step, in seconds.
    """

    backend: ClassVar[str] = BACKEND

    num_trainer_ranks: int = 1
    address: str | None = None
    store_name: str = ts.DEFAULT_STORE_NAME
    key: str = "policy"
    mode: str = "direct"
    bucket_nbytes: int = 1 << 30
    timeout: float = 600.0


class TorchStoreTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's side, on every rank.

    Where the source gives local shards (``iter_local``) of parameters that all ranks own, every rank puts its own and
    nothing is gathered. Otherwise rank 0 puts the whole tensors (``iter_full``), and has to own all of them.
    """

    init_info_cls = TorchStoreTrainerInitInfo

    def __init__(self, init_info: TorchStoreTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        self._info = init_info
        self._sharded = source.implements_iter_local() and is_shared_by(source.metadata, init_info.num_trainer_ranks)
        self._served: control.ServedJob | None = None

    @classmethod
    def trainer_init(
        cls, init_info: TorchStoreTrainerInitInfo, *, client: Any, source: Any = None
    ) -> TorchStoreTrainerWeightTransferEngine:
        """Make the engine; rank 0 has the workers join.

        Raises:
            ValueError: There is no source, or it neither gives shards that all ranks own nor all tensors to rank 0.
        """
        if source is None:
            raise ValueError("weights come from a WeightSource: pass source=ModuleSource(model), for instance")
        engine = cls(init_info, client=client, source=source)
        if not engine._sharded and not source.implements_iter_full():
            raise ValueError(
                f"{type(source).__name__} gives no shards of weights that all trainer ranks own, and no others"
            )
        if not engine._sharded and len(source.owned_names(0)) != len(source.metadata):
            raise ValueError(
                "rank 0 has to own all weights where they are not shards that every trainer rank has a part of"
            )
        if engine.is_sender:
            address = init_info.address
            if address is None:
                engine._served = control.serve_job()
                address = str(engine._served.path)
            connection = TorchStoreInitInfo(address, init_info.store_name, init_info.timeout)
            client.init_weight_transfer_engine(asdict(connection))
        return engine

    def send_weights(self) -> None:
        """Put the weights and have the workers load them; every trainer rank calls it.

        When it returns the weights may be changed again. On rank 0 the workers have loaded them.

        Raises:
            StoreError: The store or a volume of it is dead, or rank 0 did not come in time.
            RuntimeError: Rank 0 could not have the workers load them.
        """
        if self.is_sender:
            self.client.start_weight_update()
        if self._sharded:
            self._send_shards()
        else:
            for number, bucket in enumerate(self._gathered()):
                key = f"{self._info.key}.{number}"
                version = run(self._put(bucket, key, "snapshot"))
                self.client.update_weights(_described(key, version, bucket))
        if self.is_sender:
            self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Take no more workers in; the store belongs to whoever initialized it."""
        if self._served is not None:
            self._served.close()

    def _gathered(self) -> Iterator[Weights]:
        """Whole tensors; the ranks that do not send take part in gathering them, and give none."""
        whole: Iterable[tuple[str, torch.Tensor]] = self.source.iter_full()
        if self.is_sender:
            return (bucket for bucket, _ in buckets(whole, self._info.bucket_nbytes))
        for _ in whole:
            pass
        return iter(())

    def _send_shards(self) -> None:
        weights = as_dtensors(self.source.iter_local(), self.source.metadata)
        key, info = self._info.key, self._info
        version = run(self._put(weights, key, info.mode))
        failure: Exception | None = None
        if self.is_sender:
            try:
                self.client.update_weights(_described(key, version, weights))
            except Exception as error:  # noqa: BLE001  (raised again below, when the other ranks have been told)
                failure = error
        if info.mode == "direct" and info.num_trainer_ranks > 1:
            run(self._tell_ranks(version, failure) if self.is_sender else self._await_rank_0(version))
        if info.mode == "direct":
            run(ts.fence(key, store_name=info.store_name, timeout=info.timeout))
        if failure is not None:
            raise failure

    async def _put(self, weights: Weights, key: str, mode: Any) -> int:
        return await ts.put_state_dict(weights, key, self._info.store_name, mode=mode, timeout=self._info.timeout)

    async def _tell_ranks(self, version: int, failure: Exception | None) -> None:
        """Let the other ranks know that the workers have read the shards, or that it went wrong."""
        outcome = {"failure": "" if failure is None else f"{type(failure).__name__}: {failure}"}
        store_name, timeout = self._info.store_name, self._info.timeout
        await ts.put_state_dict(outcome, f"{self._info.key}.read", store_name, version=version, timeout=timeout)

    async def _await_rank_0(self, version: int) -> None:
        """Keep this rank's shards readable until the workers have read them."""
        outcome = await ts.get_state_dict(
            f"{self._info.key}.read",
            store_name=self._info.store_name,
            version=("newer_than", version - 1),
            timeout=self._info.timeout,
        )
        if outcome["failure"]:
            raise RuntimeError(f"rank 0 could not have the workers load the weights: {outcome['failure']}")


def _described(key: str, version: int, weights: Weights) -> dict[str, Any]:
    """What the workers are told of a piece."""
    dtypes = [str(weight.dtype).removeprefix("torch.") for weight in weights.values()]
    shapes = [list(weight.shape) for weight in weights.values()]
    return asdict(TorchStoreUpdateInfo(key, version, list(weights), dtypes, shapes))


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
