"""Prove that a model holds a certified version, by its own parameters, through the plan that loaded them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from typing import Any

import torch

from skipper.torchstore.algebra.layout import Box, Ints
from skipper.torchstore.errors import LoadPlanMismatchError
from skipper.torchstore.plans.load_plan import LoadPlan, tensors_of
from skipper.torchstore.plans.regions import RegionFill, dtype_of, region_of
from skipper.torchstore.proofs.certificate import Certificate
from skipper.torchstore.proofs.forms import Held, find_form
from skipper.torchstore.proofs.proof import Proof, TileComparison, WrongTile
from skipper.torchstore.tensors.cells import as_bits, cells, cells_differ, region
from skipper.torchstore.tensors.local_tensors import describe
from skipper.torchstore.tensors.state_dict import flatten
from skipper.torchstore.tensors.tiles import hashing_threads, take_tiles, tile_shape

Part = tuple[Box, torch.Tensor]
"""A box of a checkpoint tensor, and the elements of a model that should equal it."""


@torch.no_grad()
def prove(
    held: torch.nn.Module | Mapping[Any, Any],
    certificate: Certificate,
    plan: LoadPlan | None = None,
    *,
    strict: bool = True,
) -> Proof:
    """Prove that this process holds what a certificate says, by hashing the elements that it computes with.

    Nothing is fetched. Each element of the model is hashed as a part of its tile in the whole tensor of the checkpoint.
    Parts of tiles, at the edge of a shard, are kept for `join_proofs`. Tensors on a GPU are copied to the host for it,
    some MiB at a time.

    Args:
        held: With a plan, the model that it fills. Without one, a state dict with the names of the version, or a
            module, whose ``state_dict()`` is used; of DTensors, the local shard is compared.
        certificate: The certificate of the version that should be here.
        plan: A plan that was recorded for this rank's model. Padding is compared with the value that fills it. What
            goes through the model's own `load_weights` cannot be proved.
        strict: Whether it is an error if a tensor cannot be compared: one that is not in the certificate, that is
            computed from others, or that was rounded to a dtype in which the version was not certified.

    Returns:
        What was proved.

    Raises:
        ProofError: Something here differs: ``name``, ``parameter`` and ``box`` say where, ``proof`` has all of it.
            With ``strict`` also if something cannot be proved, or nothing is here.
        LoadPlanMismatchError: The plan is for another model, or a checkpoint of other tensors.
        KindMismatchError, UnsupportedPlacementError: A tensor has no dense memory, or a Partial placement.
        TypeError: ``held`` or ``certificate`` has another type.
    """
    if not isinstance(certificate, Certificate):
        raise TypeError(f"certificate must be a Certificate, not {type(certificate).__name__}")
    with hashing_threads() as threads:
        comparison = _HeldComparison(certificate, threads)
        if plan is None:
            comparison.state_dict(held)
        elif isinstance(held, torch.nn.Module):
            plan.check(held)
            _check_certified(plan, certificate)
            comparison.model(tensors_of(held), plan)
        else:
            raise TypeError(f"a plan is for a module, not {type(held).__name__}")
        proof = comparison.report()
    proof.check(strict=strict)
    return proof


class _HeldComparison(TileComparison):
    """A comparison of the tensors in this process.

    Args:
        certificate: The certificate to compare with.
        threads: The threads that hash.
    """

    def __init__(self, certificate: Certificate, threads: Executor) -> None:
        super().__init__(certificate)
        self._threads = threads

    def state_dict(self, held: object) -> None:
        """Compare the tensors of a state dict, which have the names of the version."""
        if not isinstance(held, torch.nn.Module | Mapping):
            raise TypeError(f"held must be a module or a state dict, not {type(held).__name__}")
        leaves, _ = flatten(held.state_dict() if isinstance(held, torch.nn.Module) else held)
        certified = self.certificate.tensors
        for name, value in leaves.items():
            if not isinstance(value, torch.Tensor):
                continue
            local = describe(value, key=name)
            stored = certified.get((name, ""))
            if stored is None:
                self.unproved[name] = "the certificate has no tensor of this name"
                continue
            own = str(local.tensor.dtype)
            chain = (own,) if stored.is_quantized else (f"torch.{stored.dtype}", own)
            parts = [(piece.box, region(local.tensor, piece.local, piece.box.shape)) for piece in local.pieces]
            self._show(Held(name, name, chain), local.global_shape, parts)

    def model(self, tensors: Mapping[str, torch.Tensor], plan: LoadPlan) -> None:
        """Compare the parameters of a model, each region with the region of the checkpoint from which it was filled."""
        for group in plan.whole:
            why = f"the model's own load_weights computes with it ({group.reason})"
            self.unproved.update(dict.fromkeys(group.names, why))
        for fill in plan.fills:
            self._padding(tensors[fill.parameter], fill)
        found: dict[Held, list[Part]] = {}
        for copy in plan.copies:
            recorded = plan.checkpoint[copy.checkpoint]
            parts = found.setdefault(Held(copy.checkpoint, copy.parameter, (recorded.dtype, *copy.casts)), [])
            for block in copy.blocks(recorded.shape):
                parts.append((Box(block.offsets, block.into.shape), region_of(tensors[copy.parameter], block.into)))
        for held, parts in found.items():
            self._show(held, plan.checkpoint[held.name].shape, _merged(parts))

    def _show(self, held: Held, whole: Ints, parts: Iterable[Part]) -> None:
        """Compare a parameter's part of a tensor of this shape, in the certified form."""
        certificate = self.certificate
        found = find_form(held, certificate.tensors)
        if isinstance(found, str):
            self.unproved[held.parameter] = found
            return
        at, dtype = found
        shape = certificate.tensors[at].shape
        if shape != whole:
            self.unproved[held.parameter] = f"it is certified with the shape {shape}, not {whole}"
            return
        converted: list[Part] = []
        for box, values in parts:
            if values.dtype != dtype:
                narrow = values.to(dtype)
                back, tile = narrow.to(values.dtype), tile_shape(shape)
                differs = cells_differ(values, back, box.offsets, tile).reshape(-1).tolist()
                inexact = [cell for cell, wrong in zip(cells(box, tile), differs, strict=True) if wrong]
                self.refuse(at, held.parameter, inexact)
                values = narrow
            converted.append((box, values))
        self.show(at, held.parameter, *take_tiles(converted, shape, self._threads))

    def _padding(self, tensor: torch.Tensor, fill: RegionFill) -> None:
        """Check that padding has the value that fills it."""
        here = region_of(tensor, fill.into)
        wanted = torch.full((), fill.value, dtype=tensor.dtype, device=tensor.device)
        wrong = as_bits(here) != as_bits(wanted)
        if bool(wrong.any()):
            index = wrong.nonzero()[0].tolist()
            address = fill.into.offset + sum(at * step for at, step in zip(index, fill.into.strides, strict=True))
            offsets, strides = [0] * tensor.ndim, tensor.stride()
            for dim in sorted(range(tensor.ndim), key=lambda dim: -strides[dim]):
                offsets[dim], address = divmod(address, max(strides[dim], 1))
            box = Box(tuple(offsets), (1,) * tensor.ndim)
            self.wrong.append(WrongTile(fill.parameter, fill.parameter, box))


def _merged(parts: list[Part]) -> list[Part]:
    """The same parts as one, if they form a box: otherwise, interleaved rows would cut every tile."""
    if len(parts) < 2:
        return parts
    offsets = tuple(map(min, zip(*(box.offsets for box, _ in parts), strict=True)))
    ends = zip(*(map(sum, zip(box.offsets, box.shape, strict=True)) for box, _ in parts), strict=True)
    shape = tuple(max(end) - start for end, start in zip(ends, offsets, strict=True))
    around = Box(offsets, shape)
    if sum(box.numel for box, _ in parts) != around.numel:
        return parts
    first = parts[0][1]
    together = torch.empty(shape, dtype=first.dtype, device=first.device)
    there = torch.zeros(shape, dtype=torch.bool, device=first.device)
    for box, values in parts:
        at = box.relative_to(offsets)
        as_bits(region(together, at, box.shape)).copy_(as_bits(values))
        region(there, at, box.shape).fill_(True)
    return [(around, together)] if bool(there.all()) else parts


def _check_certified(plan: LoadPlan, certificate: Certificate) -> None:
    """Check that the certificate matches the checkpoint for which the plan was recorded.

    Raises:
        LoadPlanMismatchError: A tensor is missing, or has another shape or dtype.
    """
    differences = []
    for name, recorded in plan.checkpoint.items():
        stored = certificate.tensors.get((name, ""))
        if stored is None:
            differences.append(f"{name!r} is not certified")
        elif not stored.is_quantized and stored.shape != recorded.shape:
            differences.append(f"{name!r} is certified with the shape {stored.shape}, recorded as {recorded}")
        elif not stored.is_quantized and dtype_of(stored.dtype) != dtype_of(recorded.dtype):
            differences.append(f"{name!r} is certified as {stored.dtype}, recorded as {recorded}")
    if differences:
        raise LoadPlanMismatchError(certificate.key, tuple(differences))
