"""A plan: which regions of checkpoint tensors are copied to which places in parameters."""

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
    """What a model's `load_weights` does; `record_plan` records it.

    Attributes:
        parameters: Each tensor of the model that is filled by a copy or a fill.
        checkpoint: Each checkpoint tensor that is read.
        copies: Regions that are copied from a checkpoint tensor into a parameter, unchanged or cast.
        fills: Padding.
        whole: Tensors that still need the model's own `load_weights`.
        skipped: Checkpoint tensors of which nothing is used.

    Example:
        ```python
        import tempfile
        from pathlib import Path

        import torch

        from skipper import torchstore
        from skipper.torchstore import sync as ts

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fused = torch.nn.Parameter(torch.empty(8, 4))

            def load_weights(self, weights):
                for name, tensor in weights:
                    self.fused.data.narrow(0, 0 if name == "q" else 4, 4).copy_(tensor)

        ts.initialize()
        ts.put_state_dict({"q": torch.ones(4, 4), "k": torch.zeros(4, 4)}, "policy")
        plan: torchstore.LoadPlan = torchstore.record_plan(Model(), ts.get_meta("policy").tensors)
        plan.save(path := Path(tempfile.mkdtemp(), "plan.jsonl"))
        model = Model()
        ts.load_by_plan("policy", torchstore.LoadPlan.load(path), model)
        print(plan.nbytes, model.fused.sum().item())  # 128 16.0
        ts.shutdown()
        ```
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
        """Check, tensor by tensor, that a model is the one that the plan was recorded for.

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
        """Write it as a text file, one JSON object per line, in the same order each time.

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
