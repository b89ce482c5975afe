"""A plan: which region of which checkpoint tensor goes where in which parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch

from skipper.torchstore.errors import LoadPlanMismatchError
from skipper.torchstore.plans.plan_lines import PlanParts, read, write
from skipper.torchstore.plans.regions import RecordedTensor, RegionCopy, RegionFill, WholeTensors, dtype_of
from skipper.torchstore.tensors.local_tensors import is_dtensor, why_not_dense


@dataclass(frozen=True)
class LoadPlan:
    """What `record_plan` has seen a model's `load_weights` do.

    Attributes:
        parameters: Each tensor of the model that is filled by a copy or a fill.
        checkpoint: Each checkpoint tensor that is read.
        copies: Regions that go from a checkpoint tensor into a parameter as they are, or cast.
        fills: Padding.
        whole: What the model's own `load_weights` is still needed for.
        skipped: Checkpoint tensors of which nothing is used.
    """

    parameters: Mapping[str, RecordedTensor]
    checkpoint: Mapping[str, RecordedTensor]
    copies: tuple[RegionCopy, ...]
    fills: tuple[RegionFill, ...]
    whole: tuple[WholeTensors, ...]
    skipped: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the checkpoint that one `load_by_plan` reads."""
        tensors = self.checkpoint
        copied = sum(copy.source.numel * dtype_of(tensors[copy.checkpoint].dtype).itemsize for copy in self.copies)
        return copied + sum(tensors[name].nbytes for group in self.whole for name in group.names)

    def check(self, model: torch.nn.Module) -> None:
        """See whether a model is the one that the plan was recorded for, tensor by tensor.

        Raises:
            LoadPlanMismatchError: A parameter is missing, has no memory, or has another shape, dtype or other strides.
        """
        present, differences = tensors_of(model), []
        for name, recorded in self.parameters.items():
            tensor = present.get(name)
            if tensor is None:
                differences.append(f"it has no parameter {name!r}")
            elif is_dtensor(tensor):
                differences.append(f"{name!r} is a DTensor")
            elif reason := why_not_dense(tensor):
                differences.append(f"{name!r} cannot be filled: {reason}")
            elif recorded != (found := RecordedTensor.of(tensor.shape, tensor.dtype, tensor.stride())):
                differences.append(f"{name!r} is {found}, recorded as {recorded}")
        if differences:
            raise LoadPlanMismatchError("", tuple(differences))

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as a text file, one JSON object a line, in the same order each time.

        Raises:
            OSError: It cannot be written.
        """
        parts = PlanParts(self.parameters, self.checkpoint, self.copies, self.fills, self.whole, self.skipped)
        Path(path).write_text(write(parts), encoding="utf-8")

    @staticmethod
    def load(path: str | PathLike[str]) -> LoadPlan:
        """Read what `save` has written.

        Raises:
            LoadPlanFormatError: It is something else.
            OSError: It cannot be read.
        """
        return LoadPlan(*read(Path(path).read_bytes(), str(path)))


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a model by name; tied ones by each of their names."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))
