"""The side of vLLM's workers: read what a trainer has published, and let the model load it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from skipper import control
from skipper import torchstore as ts
from skipper.torchstore.adapters.board import tell
from skipper.torchstore.adapters.vllm.background import BackgroundReader
from skipper.torchstore.adapters.vllm.catch_up import JOB_VARIABLE, catch_up
from skipper.torchstore.adapters.vllm.load_form import LoadForm, config_context
from skipper.torchstore.adapters.vllm.messages import TorchStoreInitInfo, TorchStoreUpdateInfo
from skipper.torchstore.adapters.vllm.ranks import all_say, workers_of
from skipper.torchstore.adapters.vllm.reading import RecordedLoads, UpdateReader, UpdateRecord
from skipper.torchstore.adapters.vllm.second_set import SecondSet
from skipper.torchstore.plans.replay import DEFAULT_STAGING_NBYTES

_LAST_READ_S = 10.0  # for a read that was aborted


class TorchStoreWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM is not there to be typed
    """Reads what belongs to this worker's rank, and gives it to the model when everything has arrived.

    The first update records what the model's own ``load_weights`` does (`record_plan`); every update reads by that
    plan, into memory next to the model. Only ``finish_weight_update`` changes the model, and only if every rank of its
    engine has read everything: a failed update leaves the old weights. With ``staging_nbytes`` that memory is bounded,
    and the model changes during the read; if the read fails, the model holds a mixture until the next update.

    With ``background`` a thread reads into a second set of weights while the engine continues to generate. The trainer
    sees on the job's board when the read has ended, and ``finish_weight_update`` replaces the first set by the second,
    between two steps of the engine.

    If the engine's environment has ``SKIPPER_VLLM_JOB``, the address of a job for `control.join`, a worker that starts
    joins that job and loads what its trainer has sent last, if that is in the store's volumes. The trainer need not
    send it again; until the next send, ``weight_version`` is that of vLLM's start.

    Attributes:
        last_update: The costs of the last loaded update; None before the first.
    """

    init_info_cls = TorchStoreInitInfo
    update_info_cls = TorchStoreUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.last_update: UpdateRecord | None = None
        self._name = secrets.token_hex(8)  # of this rank, on the board
        self._connection: TorchStoreInitInfo | None = None
        self._reader: UpdateReader | None = None  # of an update in progress
        self._background: BackgroundReader | None = None
        self._second_set: SecondSet | None = None
        self._recorded: WeakKeyDictionary[torch.nn.Module, RecordedLoads] = WeakKeyDictionary()
        if job := os.environ.get(JOB_VARIABLE):
            self._catch_up(job)

    def init_transfer_engine(self, init_info: TorchStoreInitInfo) -> None:
        """Join the trainer's job, and leave that of an earlier trainer.

        Raises:
            SecondSetError: ``background`` is requested, and a second set of weights is impossible.
        """
        self._together(lambda: self._connect(init_info))

    def start_weight_update(self) -> None:
        """Begin an update; the model continues with its weights.

        Raises:
            RuntimeError: `init_transfer_engine` was not called, or an aborted read is still running.
        """
        self._together(self._begin)

    def receive_weights(self, update_info: TorchStoreUpdateInfo) -> None:
        """Read this rank's part of a piece, once all trainer ranks have put it; in the background, only start to read.

        If that fails on one rank of the engine, all ranks learn of it, and keep their weights.

        Raises:
            RuntimeError: `start_weight_update` was not called, or another rank has failed.
            StoreError: It cannot be read: its trainer or its volume is dead, or it does not match the model.
            ValueError: The update leaves parameters of the model without weights.
        """
        if update_info.is_aborted:
            self._close()
            return
        if update_info.question:
            tell("answer", update_info.update, self._name, update_info.question)
            return
        self._together(lambda: self._receive(update_info))

    def finish_weight_update(self) -> None:
        """Give the model what was read, if the update is complete; otherwise it keeps its weights.

        Raises:
            RuntimeError: The read in the background has failed, here or on another rank.
        """
        try:
            if self._background is not None:
                self._background.give_up()  # after the pieces that it was given to read
                if self._together(self._background.result):
                    self.last_update = self._background.flip()
            elif self._reader is not None and self._reader.is_complete:
                self._reader.load()
                self.last_update = self._reader.record()
        finally:
            self._close()

    def shutdown(self) -> None:
        """Release the store; the worker continues, and leaves the job when it ends."""
        self._close()
        if self._connection is not None:
            ts.reset_client(self._connection.store_name)
            self._connection = None

    def _catch_up(self, job: str) -> None:
        form = LoadForm(self.model, self.model_config)
        known = self._recorded.setdefault(self.model, {})
        with config_context(self.vllm_config):
            self._connection, self.last_update = catch_up(job, form, known, self.device, self._group())

    def _connect(self, init_info: TorchStoreInitInfo) -> None:
        if init_info.background:
            self._ensure_second_set(init_info)
        if self._connection is not None and self._connection.address != init_info.address:
            self.shutdown()
        control.join(init_info.address, timeout=init_info.timeout, replace=True)
        self._connection = init_info

    def _begin(self) -> None:
        self._close()
        connection = self._connection
        if connection is None:
            raise RuntimeError("call init_transfer_engine before the first update")
        if connection.background:
            second_set = self._ensure_second_set(connection)
            second_set.begin()
            part_nbytes = connection.staging_nbytes or DEFAULT_STAGING_NBYTES
            self._reader = self._new_reader(second_set.form, part_nbytes, is_beside=True)
        else:
            self._reader = self._new_reader(LoadForm(self.model, self.model_config), connection.staging_nbytes)

    def _receive(self, info: TorchStoreUpdateInfo) -> None:
        reader = self._reader
        if self._connection is None:
            raise RuntimeError("call init_transfer_engine before the first update")
        if reader is None:
            raise RuntimeError("call start_weight_update before each update")
        if not info.update:
            reader.receive(info)
            return
        if self._background is None:
            assert self._second_set is not None, "start_weight_update makes it"
            update, name = info.update, self._name
            tell("begun", update, name)
            self._background = BackgroundReader(
                reader, self._second_set, self._connection.timeout, lambda failure: tell("ended", update, name, failure)
            )
        self._background.add(info)

    def _ensure_second_set(self, connection: TorchStoreInitInfo) -> SecondSet:
        if self._second_set is None or not self._second_set.belongs_to(self.model):
            self._second_set = None  # first, because its memory is needed
            self._second_set = SecondSet(
                self.model,
                self.vllm_config,
                self.device,
                staging_nbytes=connection.staging_nbytes or DEFAULT_STAGING_NBYTES,
                limit_nbytes=connection.second_set_nbytes,
            )
        return self._second_set

    def _new_reader(self, form: LoadForm, part_nbytes: int | None, *, is_beside: bool = False) -> UpdateReader:
        connection = self._connection
        assert connection is not None, "start_weight_update has checked it"
        known = self._recorded.setdefault(self.model, {})
        return UpdateReader(form, known, connection, self.device, part_nbytes=part_nbytes, is_beside=is_beside)

    def _close(self) -> None:
        """End the update in progress, if there is one; the model keeps its weights.

        Raises:
            RuntimeError: The read is still running.
        """
        reader, self._reader = self._reader, None
        background = self._background
        if background is None:
            if reader is not None:
                reader.close()
            return
        background.give_up()
        if not background.wait(_LAST_READ_S):
            raise RuntimeError(f"an aborted read of weights has not ended after {_LAST_READ_S:g} s")
        self._background = None

    def _together(self, step: Callable[[], object]) -> bool:
        """A step of all ranks of this engine; if one of them fails, the update ends on all.

        vLLM reads the answers of its workers in the order of ranks, up to the first failure; it would take later
        answers for those to its next call. So only the last rank raises.

        Returns:
            Whether all of them have succeeded.
        """
        failure: Exception | None = None
        try:
            step()
        except Exception as error:  # noqa: BLE001  (raised again below, when the other ranks have been told)
            failure = error
        group = self._group()
        own = "" if failure is None else f"{type(failure).__name__}: {failure}"
        said = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(all_say(own, group)) if each)
        if not said:
            return True
        self._close()
        if group is None or group.rank_in_group == group.world_size - 1:
            raise failure or RuntimeError(f"a rank of this engine has failed, and all keep their weights: {said}")
        return False

    def _group(self) -> Any:
        return workers_of(self.parallel_config)
