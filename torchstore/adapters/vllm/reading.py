"""One update in a worker: read what belongs to its rank, and let a model load it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from skipper import torchstore as ts
from skipper.torchstore.adapters.vllm.load_form import (
    LoadForm,
    RecordedLoad,
    Shapes,
    Tensors,
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

RecordedLoads = dict[Any, RecordedLoad]
"""How a model takes its weights, by the names and shapes of the weights."""


@dataclass(frozen=True)
class UpdateRecord:
    """The costs of the last update that this worker has loaded.

    Attributes:
        version: The version of the (last) piece.
        nbytes: The bytes that this worker has read from the store.
        parameter_nbytes: The bytes of the parameters that it filled.
        staged_nbytes: The most memory that was used at a time in addition to the model, or to both sets of weights.
        plan_s: The time to record what the model's ``load_weights`` does, at the first update.
        transfer_s: The time to read.
        load_s: The time to load it into the model.
        whole: How many weights were read whole, because a plan cannot express what is done with them.
        flip: How a second set of weights replaced the first, "pointers" or "copy"; empty if there was none.
        flip_s: The time of that step.
    """

    version: int
    nbytes: int
    parameter_nbytes: int
    staged_nbytes: int
    plan_s: float
    transfer_s: float
    load_s: float
    whole: int
    flip: str = ""
    flip_s: float = 0.0


class UpdateReader:
    """Reads the pieces of one update, and keeps them until the model has loaded all of them.

    Args:
        form: The load form of the model.
        known: The plans recorded so far; new ones are added.
        connection: The connection to the trainer's store.
        device: The device of the model.
        part_nbytes: The model gets parts of the update as they arrive, each with at most this many bytes or one layer;
            None: everything at the end, so that a failed transfer changes nothing. Updates in several pieces wait for
            the last piece, unless ``is_beside``.
        is_beside: The model is not used for computation, so it gets complete layers as they arrive, also in updates of
            several pieces.
        version_of: Returns the version to read for the number in the trainer's message.

    Attributes:
        is_complete: Whether all pieces have been read.
    """

    def __init__(
        self,
        form: LoadForm,
        known: RecordedLoads,
        connection: TorchStoreInitInfo,
        device: torch.device,
        *,
        part_nbytes: int | None,
        is_beside: bool = False,
        version_of: Callable[[int], Any] = lambda number: ("newer_than", number - 1),
    ) -> None:
        self.is_complete = False
        self._form = form
        self._known = known
        self._connection = connection
        self._device = device
        self._part_nbytes = part_nbytes
        self._is_beside = is_beside
        self._version_of = version_of
        self._staged: dict[str, torch.Tensor] = {}
        self._whole: dict[str, torch.Tensor] = {}
        self._filled: dict[str, int] = {}
        self._placed: set[str] = set()  # the part of what was read that the model has loaded
        self._loaded: set[str] | None = set()
        self._has_begun = False
        self._is_open = False  # the model is in its form for loading
        self._version = self._nbytes = self._parameter_nbytes = self._staged_nbytes = self._whole_count = 0
        self._plan_s = self._transfer_s = self._load_s = 0.0

    def receive(self, info: TorchStoreUpdateInfo) -> None:
        """Read this rank's part of one piece.

        Raises:
            StoreError: It cannot be read: its trainer or its volume is dead, or it does not match the model.
            ValueError: The update leaves parameters of the model without weights.
        """
        if info.names:
            begin = time.perf_counter()
            recorded = self._record(info)
            self._plan_s += time.perf_counter() - begin
            if self._loaded is not None and recorded.loaded is not None:
                self._loaded |= recorded.loaded
            else:
                self._loaded = None
            if info.is_last:
                self._check_complete()
            is_alone = info.is_last and not self._has_begun
            self._has_begun = True
            in_parts = self._part_nbytes is not None and (is_alone or self._is_beside)
            for part in parts_of(recorded.plan, self._part_nbytes if in_parts else None):
                self._read(part, info)
                if in_parts:
                    self._place(self._staged if is_alone else self._whole_layers(), self._whole if is_alone else {})
        if info.is_last:
            self._check_mixed()
            self.is_complete = True

    def load(self) -> None:
        """Give the model the rest; from then on it runs with the new weights."""
        begin = time.perf_counter()
        self._open()
        self._form.place(self._staged, self._whole)
        self._form.end()
        self._is_open = False
        self._load_s += time.perf_counter() - begin

    def close(self) -> None:
        """Release what was read; the model keeps what it has, and can run."""
        self._staged.clear()
        self._whole.clear()
        if self._is_open:
            self._is_open = False
            self._form.end()

    def record(self, *, flip: str = "", flip_s: float = 0.0) -> UpdateRecord:
        """The costs until now."""
        return UpdateRecord(
            self._version,
            self._nbytes,
            self._parameter_nbytes,
            self._staged_nbytes,
            self._plan_s,
            self._transfer_s,
            self._load_s,
            self._whole_count,
            flip,
            flip_s,
        )

    def _record(self, info: TorchStoreUpdateInfo) -> RecordedLoad:
        """The plan of a piece, recorded the first time that this model gets these weights."""
        shapes: Shapes = {
            name: (tuple(shape), dtype_of(dtype))
            for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True)
        }
        key = tuple(shapes.items())
        if key not in self._known:
            recorded = self._form.record(shapes)
            plan, filled = recorded.plan, filled_numel(recorded.plan)
            if plan.whole and any(filled[name] < each.all.numel for name, each in plan.parameters.items()):
                reason = "a parameter takes one weight by a plan, and another one whole"
                recorded = RecordedLoad(all_whole(plan, reason), recorded.loaded)
            self._known[key] = recorded
        return self._known[key]

    def _read(self, plan: ts.LoadPlan, info: TorchStoreUpdateInfo) -> None:
        begin = time.perf_counter()
        connection = self._connection
        for name, recorded in plan.parameters.items():
            if name in self._placed:
                raise ValueError(
                    f"{name} comes twice, in different pieces: send both in one, with a larger bucket_nbytes"
                )
            if name not in self._staged:
                self._staged[name] = empty_for(recorded, self._device)
                self._parameter_nbytes += recorded.nbytes
        into = module_of({name: self._staged[name] for name in plan.parameters})
        if plan.parameters or plan.whole:
            self._version = run(
                lambda: ts.load_by_plan(
                    info.key,
                    plan,
                    into,
                    connection.store_name,
                    load_weights=lambda weights: self._whole.update(weights),
                    version=self._version_of(info.version),
                    staging_nbytes=connection.staging_nbytes or DEFAULT_STAGING_NBYTES,
                    timeout=connection.timeout,
                )
            )
            record = ts.last_sync(connection.store_name)
            self._nbytes += record.nbytes if record is not None else 0
        for name, numel in filled_numel(plan).items():
            self._filled[name] = self._filled.get(name, 0) + numel
        self._whole_count += sum(len(group.names) for group in plan.whole)
        beside = sum(tensor.nbytes for tensor in (*self._staged.values(), *self._whole.values()))
        self._staged_nbytes = max(self._staged_nbytes, beside)
        self._transfer_s += time.perf_counter() - begin

    def _open(self) -> None:
        """Bring the model into its form for loading."""
        if not self._is_open:
            self._form.begin()
            self._is_open = True

    def _place(self, staged: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]) -> None:
        """Give the model some of what was read now, to free its memory."""
        begin = time.perf_counter()
        self._open()
        self._form.place(staged, whole)
        self._placed.update(staged)
        for name in list(staged):
            del self._staged[name]
        for name in list(whole):
            del self._whole[name]
        self._load_s += time.perf_counter() - begin

    def _whole_layers(self) -> Tensors:
        """The tensors of layers whose elements have all been read; others wait for more pieces, or for the end."""
        self._open()
        layers: dict[str, Tensors] = {}
        for name, tensor in self._staged.items():
            if self._filled[name] == tensor.numel():
                layers.setdefault(name.rpartition(".")[0], {})[name] = tensor
        return {
            name: tensor
            for path, tensors in layers.items()
            if self._form.names_of(path) <= tensors.keys()
            for name, tensor in tensors.items()
        }

    def _check_complete(self) -> None:
        """Check that an update covers the whole model.

        Raises:
            ValueError: Parameters would keep their old values.
        """
        if self._loaded is not None and (missing := self._form.missing(frozenset(self._loaded))):
            raise ValueError(f"the trainer sends nothing for {', '.join(missing[:8])} ({len(missing)} parameters)")

    def _check_mixed(self) -> None:
        """Check that parameters read by plans are complete, apart from weights that the model loads by itself.

        Raises:
            ValueError: A parameter is filled only in part.
        """
        if self._whole:
            partly = [name for name, tensor in self._staged.items() if self._filled[name] < tensor.numel()]
            if partly:
                raise ValueError(
                    f"{partly[0]} is filled from one weight by a plan and from another one as a whole, and the two "
                    "came in different buckets: send both in one bucket, with a larger bucket_nbytes"
                )
