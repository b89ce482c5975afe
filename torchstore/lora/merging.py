"""Add an adapter to the matrices of its base, in place, and remove it again, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from skipper.torchstore.errors import AdapterBaseMismatchError, LayoutMismatchError, StateDictMismatchError
from skipper.torchstore.lora.adapter import BaseVersion, LoRAAdapter, LowRank
from skipper.torchstore.tensors.cells import region
from skipper.torchstore.tensors.local_tensors import describe, is_dtensor, local_of
from skipper.torchstore.tensors.written import writing_mode, written

_STRIP = 1 << 20  # elements of a matrix that are computed in float32 at a time


class LoRAMerger:
    """Merges adapters into a model that serves without them.

    Each merge starts from the base itself: W = base + scale * (B @ A), computed in float32 and rounded once. For this,
    a merger keeps a copy of the matrices that an adapter has changed, and only of these, from the first merge until
    `unmerge`. Do not change these matrices while an adapter is merged; read a new base after `unmerge`.

    Args:
        base: The parameters of the model, by name (its ``state_dict()``); plain tensors or DTensors of any layout.
        version: The version of the base; adapters of another one are refused. None: any.
        device: The device where the copies are kept.

    Example:
        ```python
        import torch

        from skipper import torchstore
        from skipper.torchstore import BaseVersion, LoRAAdapter, LoRAMerger
        from skipper.torchstore import sync as ts

        class Projection(torch.nn.Module):  # PEFT's layers have these names
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.randn(8, 8))
                self.lora_A = torch.nn.Linear(8, 2, bias=False)
                self.lora_B = torch.nn.Linear(2, 8, bias=False)

        ts.initialize()
        model = torch.nn.ModuleDict({"proj": Projection()})
        base = BaseVersion("policy", ts.put_state_dict({"proj.weight": model["proj"].weight}, "policy"))
        ts.put_lora(torchstore.lora_adapter_of(model, config={"r": 2, "lora_alpha": 4}, base=base), "policy-lora")

        served = ts.get_state_dict("policy", version=base.version)
        adapter: LoRAAdapter = ts.get_lora("policy-lora", base=base)
        merger = LoRAMerger(served, version=base)
        merger.merge(adapter)  # W = base + scale * (B @ A)
        merger.unmerge()
        print(torch.equal(served["proj.weight"], model["proj"].weight))  # True
        ts.shutdown()
        ```
    """

    def __init__(
        self,
        base: Mapping[str, torch.Tensor],
        *,
        version: BaseVersion | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self._base = base
        self._version = version
        self._device = torch.device(device)
        self._copies: dict[str, torch.Tensor] = {}
        self._merged: set[str] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of the copies that it keeps."""
        return sum(copy.nbytes for copy in self._copies.values())

    @torch.no_grad()
    def merge(self, adapter: LoRAAdapter) -> None:
        """Set the model to its base with this adapter, in place of an adapter that was merged before.

        Everything is checked before anything is written.

        Args:
            adapter: An adapter of whole tensors, as `get_lora` returns them, on any device.

        Raises:
            AdapterBaseMismatchError: The adapter belongs to another base.
            StateDictMismatchError: It adapts matrices that the model does not have.
            LayoutMismatchError: A matrix has another shape.
            TypeError: One of its tensors is a DTensor.
            ValueError: It is of a kind that adds more than a product of two matrices.
        """
        if self._version is not None and adapter.base is not None and adapter.base != self._version:
            theirs, ours = adapter.base, self._version
            raise AdapterBaseMismatchError(
                "adapter", adapter.version or 0, (theirs.key, theirs.version), (ours.key, ours.version)
            )
        products = self._products(adapter)
        for name in self._merged - products.keys():
            self._restore(name)
        for name, product in products.items():
            if name not in self._copies:
                self._copies[name] = local_of(self._base[name]).to(self._device, copy=True)
            self._merged.add(name)
            self._add(name, product)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Set the model to its base again, bit for bit, and free the copies. Without a merge this does nothing."""
        for name in tuple(self._merged):
            self._restore(name)
        self._copies.clear()

    def _products(self, adapter: LoRAAdapter) -> dict[str, LowRank]:
        """The updates, by the name of the parameter to which they are added."""
        found: dict[str, LowRank] = {}
        missing: list[str] = []
        for product in adapter.products():
            if is_dtensor(product.a) or is_dtensor(product.b):
                raise TypeError(
                    f"the factors of {product.module!r} are DTensors: get_lora without into= gives whole ones"
                )
            names = (f"{product.module}.weight", f"{product.module}.base_layer.weight")
            name = next(
                (
                    n
                    for prefix in ("", "base_model.model.")
                    for n in (prefix + each for each in names)
                    if n in self._base
                ),
                None,
            )
            if name is None:
                missing.append(names[0])
                continue
            shape = (product.b.shape[0], product.a.shape[1])
            shape = shape[::-1] if product.is_transposed else shape
            if tuple(self._base[name].shape) != shape:
                raise LayoutMismatchError(
                    name, f"it has shape {tuple(self._base[name].shape)}, its adapter is for {shape}"
                )
            found[name] = product
        if missing:
            raise StateDictMismatchError("adapter", tuple(missing), ())
        return found

    def _add(self, name: str, product: LowRank) -> None:
        local, copy = describe(self._base[name], key=name), self._copies[name]
        tensor = local.tensor
        left, right = (product.a.T, product.b.T) if product.is_transposed else (product.b, product.a)
        with written([self._base[name]]), writing_mode(tensor):
            for piece in local.pieces:
                (row, column), (height, width) = piece.box.offsets, piece.box.shape
                into, before = region(tensor, piece.local, piece.box.shape), region(copy, piece.local, piece.box.shape)
                columns = right[:, column : column + width].to(tensor.device, torch.float32)
                step = max(_STRIP // max(width, 1), 1)
                for start in range(0, height, step):
                    rows = left[row + start : row + min(start + step, height)].to(tensor.device, torch.float32)
                    base = before[start : start + step].to(tensor.device, torch.float32)
                    into[start : start + step] = torch.addmm(base, rows, columns, alpha=product.scale)

    def _restore(self, name: str) -> None:
        tensor = local_of(self._base[name])
        with written([self._base[name]]), writing_mode(tensor):
            tensor.copy_(self._copies[name])
        self._merged.discard(name)
