"""The side of vLLM's workers: read what a trainer has published, and have the model load it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from skipper import control
from skipper import torchstore as ts
from skipper.torchstore.adapters.vllm.load_form import (
    LoadForm,
    RecordedLoad,
    Shapes,
    all_whole,
    empty_for,
    filled_numel,
    module_of,
    parts_of,
)
from skipper.torchstore.adapters.vllm.messages import TorchStoreInitInfo, TorchStoreUpdateInfo
from skipper.torchstore.plans.regions import dtype_of
from skipper.torchstore.plans.replay import DEFAULT_STAGING_NBYTES
from skipper.torchstore.support.blocking import run

_SAID_NBYTES = 2048  # of what a worker tells the others of its failure


@dataclass(frozen=True)
class UpdateRecord:
    """What the last update that this worker has loaded took.

    Attributes:
        version: Of the (last) piece.
        nbytes: Read from the store by this worker.
        parameter_nbytes: Of the parameters that it filled.
        staged_nbytes: At most so much was beside the model at a time.
        plan_s: Recording what the model's ``load_weights`` does, the first time.
        transfer_s: Reading.
        load_s: Giving it to the model.
        whole: How many weights were read whole, since a plan has no words for what is done with them.
    """

    version: int
    nbytes: int
    parameter_nbytes: int
    staged_nbytes: int
    plan_s: float
    transfer_s: float
    load_s: float
    whole: int


@dataclass
class _Update:
    """An update that has begun: what has come of it, and not yet to the model."""

    form: LoadForm
    staged: dict[str, torch.Tensor] = field(default_factory=dict)
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    filled: dict[str, int] = field(default_factory=dict)
    loaded: set[str] | None = field(default_factory=set)
    version: int = 0
    nbytes: int = 0
    parameter_nbytes: int = 0
    staged_nbytes: int = 0
    whole_count: int = 0
    plan_s: float = 0.0
    transfer_s: float = 0.0
    load_s: float = 0.0
    is_complete: bool = False
    is_open: bool = False  # the model is in its form for loading
    is_failed: bool = False


class TorchStoreWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM is not there to be typed
    """Reads what belongs to this worker's rank, and gives it to the model when all of it is there.

    The first update records what the model's own ``load_weights`` does (`record_plan`); each one reads by that plan,
    into memory beside the model. ``finish_weight_update`` alone changes the model, and only if every rank of its engine
    has read everything: an update that fails leaves the old weights. With ``staging_nbytes`` the memory beside the
    model is bounded, and the model changes while it is read; where that fails it holds a mixture, until it is updated.

    Attributes:
        last_update: Of the last update that was loaded; None before the first.
    """

    init_info_cls = TorchStoreInitInfo
    update_info_cls = TorchStoreUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.last_update: UpdateRecord | None = None
        self._connection: TorchStoreInitInfo | None = None
        self._update: _Update | None = None
        self._recorded: WeakKeyDictionary[torch.nn.Module, dict[Any, RecordedLoad]] = WeakKeyDictionary()

    def init_transfer_engine(self, init_info: TorchStoreInitInfo) -> None:
        """Join the trainer's job, and leave that of the trainer before."""
        if self._connection is not None and self._connection.address != init_info.address:
            self.shutdown()
        control.join(init_info.address, timeout=init_info.timeout, replace=True)
        self._connection = init_info

    def start_weight_update(self) -> None:
        """Begin an update; the model goes on with the weights that it has."""
        self._close()
        self._update = _Update(LoadForm(self.model, self.model_config))

    def receive_weights(self, update_info: TorchStoreUpdateInfo) -> None:
        """Read this rank's part of one piece, when all trainer ranks have put it.

        Where that fails on one rank of the engine, all of them know of it, and keep the weights that they have.

        Raises:
            RuntimeError: `init_transfer_engine` or `start_weight_update` was not called, or another rank has failed.
            StoreError: It cannot be read: its trainer or its volume is dead, or it does not fit the model.
            ValueError: The update leaves parameters of the model without weights.
        """
        if update_info.is_aborted:
            self._fail()
            return
        failure: Exception | None = None
        try:
            self._receive(update_info)
        except Exception as error:  # noqa: BLE001  (raised again below, when the other ranks have been told)
            failure = error
        group = self._group()
        said = _tell(failure, group)
        if not said:
            return
        self._fail()
        # vLLM reads the answers of its workers in the order of their ranks, up to the first failure: what comes after
        # that would be taken for answers to its next call. So the last rank alone answers with the failure.
        if group is None or group.rank_in_group == group.world_size - 1:
            raise failure or RuntimeError(f"a rank of this engine has failed, and all keep their weights: {said}")

    def finish_weight_update(self) -> None:
        """Give the model what was read, if that is a whole update; else it keeps what it has."""
        update = self._update
        try:
            if update is None or update.is_failed or not update.is_complete:
                return
            begin = time.perf_counter()
            if not update.is_open:
                update.form.begin()
                update.is_open = True
                update.form.place(update.staged, update.whole)
            update.form.end()
            update.is_open = False
            update.load_s += time.perf_counter() - begin
            self.last_update = UpdateRecord(
                update.version,
                update.nbytes,
                update.parameter_nbytes,
                update.staged_nbytes,
                update.plan_s,
                update.transfer_s,
                update.load_s,
                update.whole_count,
            )
        finally:
            self._close()

    def shutdown(self) -> None:
        """Let go of the store; the worker lives on, and leaves the job when it ends."""
        self._close()
        if self._connection is not None:
            ts.reset_client(self._connection.store_name)
            self._connection = None

    def _receive(self, info: TorchStoreUpdateInfo) -> None:
        update, connection = self._update, self._connection
        if connection is None:
            raise RuntimeError("call init_transfer_engine before the first update")
        if update is None:
            raise RuntimeError("call start_weight_update before each update")
        if info.names:
            begin = time.perf_counter()
            recorded = self._record(update.form, info)
            update.plan_s += time.perf_counter() - begin
            if update.loaded is not None and recorded.loaded is not None:
                update.loaded |= recorded.loaded
            else:
                update.loaded = None
            if info.is_last:
                self._check_complete(update)
            bounded = connection.staging_nbytes is not None and info.is_last and not update.staged
            for part in parts_of(recorded.plan, connection.staging_nbytes if bounded else None):
                self._read(update, part, info, connection)
                if bounded:
                    self._place(update)
        if info.is_last:
            self._check_mixed(update)
            update.is_complete = True

    def _record(self, form: LoadForm, info: TorchStoreUpdateInfo) -> RecordedLoad:
        """The plan of a piece, recorded the first time that this model is given these weights."""
        known = self._recorded.setdefault(self.model, {})
        shapes: Shapes = {
            name: (tuple(shape), dtype_of(dtype))
            for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True)
        }
        key = tuple(shapes.items())
        if key not in known:
            recorded = form.record(shapes)
            plan, filled = recorded.plan, filled_numel(recorded.plan)
            if plan.whole and any(filled[name] < each.all.numel for name, each in plan.parameters.items()):
                reason = "a parameter takes one weight by a plan, and another one whole"
                recorded = RecordedLoad(all_whole(plan, reason), recorded.loaded)
            known[key] = recorded
        return known[key]

    def _read(
        self, update: _Update, plan: ts.LoadPlan, info: TorchStoreUpdateInfo, connection: TorchStoreInitInfo
    ) -> None:
        begin = time.perf_counter()
        for name, recorded in plan.parameters.items():
            if name not in update.staged:
                update.staged[name] = empty_for(recorded, self.device)
                update.parameter_nbytes += recorded.nbytes
        into = module_of({name: update.staged[name] for name in plan.parameters})
        if plan.parameters or plan.whole:
            update.version = run(
                lambda: ts.load_by_plan(
                    info.key,
                    plan,
                    into,
                    connection.store_name,
                    load_weights=lambda weights: update.whole.update(weights),
                    version=("newer_than", info.version - 1),
                    staging_nbytes=connection.staging_nbytes or DEFAULT_STAGING_NBYTES,
                    timeout=connection.timeout,
                )
            )
            record = ts.last_sync(connection.store_name)
            update.nbytes += record.nbytes if record is not None else 0
        for name, numel in filled_numel(plan).items():
            update.filled[name] = update.filled.get(name, 0) + numel
        update.whole_count += sum(len(group.names) for group in plan.whole)
        beside = sum(tensor.nbytes for tensor in (*update.staged.values(), *update.whole.values()))
        update.staged_nbytes = max(update.staged_nbytes, beside)
        update.transfer_s += time.perf_counter() - begin

    def _place(self, update: _Update) -> None:
        """Give the model a part at once, to have its memory back."""
        begin = time.perf_counter()
        if not update.is_open:
            update.form.begin()
            update.is_open = True
        update.form.place(update.staged, update.whole)
        update.staged.clear()
        update.whole.clear()
        update.load_s += time.perf_counter() - begin

    def _check_complete(self, update: _Update) -> None:
        """See whether an update is one of the whole model.

        Raises:
            ValueError: Parameters would keep their old values.
        """
        if update.loaded is not None and (missing := update.form.missing(frozenset(update.loaded))):
            raise ValueError(f"the trainer sends nothing for {', '.join(missing[:8])} ({len(missing)} parameters)")

    def _check_mixed(self, update: _Update) -> None:
        """See whether what was read by plans is there as a whole, next to weights that the model loads by itself.

        Raises:
            ValueError: A parameter is filled in part.
        """
        if update.whole:
            partly = [name for name, tensor in update.staged.items() if update.filled[name] < tensor.numel()]
            if partly:
                raise ValueError(
                    f"{partly[0]} takes one weight by a plan and another one whole, which came in different pieces: "
                    "send both in one, with a larger bucket_nbytes"
                )

    def _fail(self) -> None:
        if self._update is not None:
            self._close()
            self._update = _Update(LoadForm(self.model, self.model_config), is_failed=True)

    def _close(self) -> None:
        update, self._update = self._update, None
        if update is not None and update.is_open:
            update.form.end()

    def _group(self) -> Any:
        """The workers of this engine, if there are several."""
        if getattr(self.parallel_config, "world_size", 1) == 1:
            return None
        state: Any = import_module("vllm.distributed.parallel_state")
        group = state.get_world_group()
        if group.world_size == self.parallel_config.world_size:
            return group
        # With data parallelism the world has several engines, of which each answers for itself.
        tensor_group = state.get_tp_group()
        return tensor_group if tensor_group.world_size == self.parallel_config.world_size else None


def _tell(failure: Exception | None, group: Any) -> str:
    """Tell the other ranks what went wrong here; what went wrong anywhere, or an empty text."""
    own = "" if failure is None else f"{type(failure).__name__}: {failure}"
    if group is None:
        return own
    mine = torch.zeros(_SAID_NBYTES, dtype=torch.uint8)
    text = (f"rank {group.rank_in_group}: {own}" if own else "").encode()[:_SAID_NBYTES]
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
    every = [torch.empty_like(mine) for _ in range(group.world_size)]
    torch.distributed.all_gather(every, mine, group=group.cpu_group)
    texts = [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in every]
    return "; ".join(filter(None, texts))
