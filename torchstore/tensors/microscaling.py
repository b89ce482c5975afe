"""MXFP8 and NVFP4: short parts of a row share a scale, which is itself a small float.

MXFP8 is defined by the OCP Microscaling Formats specification, version 1.0: 32 elements of E4M3 and a scale that is a
power of two (E8M0). NVFP4 has 16 elements of E2M1, a scale in E4M3, and one float32 scale for the whole tensor. The
stored tensors have the names of modelopt's checkpoints, which vLLM, SGLang and TensorRT-LLM load: ``weight``,
``weight_scale`` and, for NVFP4, ``weight_scale_2``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch

from skipper.torchstore.algebra.layout import Ints
from skipper.torchstore.tensors.cells import region
from skipper.torchstore.tensors.local_tensors import describe, is_dtensor, local_of
from skipper.torchstore.tensors.quantization import Quantization
from skipper.torchstore.tensors.state_dict import flatten

_E4M3_MAX = 448.0
_E4M3_TOP = 8  # the exponent of 448: emax of the specification
_E4M3_LEAST = 2.0**-9
_E8M0_BIAS = 127
_E8M0_NAN = 255
_E2M1_MAX = 6.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # indexed by the lower three bits; the fourth is the sign
_STRIP = 1 << 20  # elements that are processed at a time

Peak = float | Sequence[float]
"""The peak of a matrix, or of each matrix of a stack."""


@dataclass(frozen=True, slots=True)
class MXFP8(Quantization):
    """``put_state_dict(transfer_dtype=MXFP8())``: 8-bit floats with a power of two for each 32 elements of a row.

    An element is the value divided by its block's scale, rounded to the nearest ``float8_e4m3fn`` (ties to even), at
    most 448 in magnitude. A block of zeros has the scale 1. A block with an infinity or a NaN has the scale NaN, and
    all of its dequantized values are NaN. The last block of a row may be shorter; engines need rows of whole blocks.

    Attributes:
        rounding: How the scale is chosen. "floor", as the specification does: 2**(floor(log2(peak)) - 8), so magnitudes
            from 448 to 512 times the scale become 448, an error of up to an eighth. "ceil": the least power of two with
            which the peak is at most 448; nothing saturates, and normal elements are within 1/16 of their values.
        scale_dtype: ``torch.float8_e8m0fnu``, or ``torch.uint8`` for readers whose parameters have that dtype, such as
            vLLM's: the bits are the same.
        select: Says by name which of the floating-point matrices are quantized; None: all. Give the same function
            every time.
        experts: The same for tensors of three dims, which are stacks of matrices, one for each expert; None: none.

    Raises:
        ValueError: Another rounding or dtype.

    Example:
        ```python
        import torch

        from skipper import torchstore
        from skipper.torchstore import sync as ts

        ts.initialize()
        ts.put_state_dict({"w": torch.randn(64, 64)}, "policy", transfer_dtype=torchstore.MXFP8(rounding="ceil"))
        stored = ts.get_state_dict("policy")
        print(stored["w"].dtype, stored["w_scale"].shape)  # torch.float8_e4m3fn torch.Size([64, 2])
        ts.shutdown()
        ```
    """

    format: ClassVar[str] = "MXFP8"
    scale_suffix: ClassVar[str] = "_scale"
    block: ClassVar[Ints] = (1, 32)
    dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn

    rounding: Literal["floor", "ceil"] = "floor"
    scale_dtype: torch.dtype = torch.float8_e8m0fnu
    select: Callable[[str], bool] | None = None
    experts: Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        if self.rounding not in ("floor", "ceil"):
            raise ValueError(f"transfer_dtype: rounding is 'floor' or 'ceil', not {self.rounding!r}")
        if self.scale_dtype not in (torch.float8_e8m0fnu, torch.uint8):
            raise ValueError(f"transfer_dtype: scales are float8_e8m0fnu or uint8, not {self.scale_dtype}")

    def scales(self, peaks: torch.Tensor, tensor_scale: torch.Tensor | None) -> torch.Tensor:
        """Powers of two, as biased exponents."""
        mantissa, exponent = torch.frexp(peaks)  # peak = mantissa * 2**exponent, 1/2 <= mantissa < 1
        exponent = exponent - 1 - _E4M3_TOP
        if self.rounding == "ceil":
            exponent += mantissa > _E4M3_MAX / 2 ** (_E4M3_TOP + 1)
        codes = exponent.clamp(-_E8M0_BIAS, _E8M0_BIAS) + _E8M0_BIAS
        codes = torch.where(peaks == 0, _E8M0_BIAS, codes)
        return torch.where(peaks.isfinite(), codes, _E8M0_NAN).to(torch.uint8).view(self.scale_dtype)

    def encode(self, ratios: torch.Tensor) -> torch.Tensor:
        """The nearest E4M3 numbers, saturated."""
        return ratios.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)

    @staticmethod
    def factors(scales: torch.Tensor, tensor_scale: torch.Tensor | None) -> torch.Tensor:
        """The powers of two."""
        return scales.view(torch.float8_e8m0fnu).float()

    @staticmethod
    def decode(elements: torch.Tensor) -> torch.Tensor:
        """The values, converted like in torch."""
        return elements.float()


@dataclass(frozen=True, slots=True)
class NVFP4(Quantization):
    """``put_state_dict(transfer_dtype=NVFP4())``: 4-bit floats with an 8-bit scale for each 16 elements of a row.

    All in float32: the tensor's scale is its peak / (6 * 448), or 1 if that is 0; a block's scale is the block's
    peak / (6 * tensor's scale), rounded to the nearest ``float8_e4m3fn``, at least 2**-9, the least of them that is not
    0; an element is the value / (block's scale * tensor's scale), rounded to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4
    and 6 (ties to the even code), with the value's sign. The first of two elements lies in the lower half of a byte.
    A block with an infinity or a NaN has the scale NaN, and all of its dequantized values are NaN; it does not count
    for the tensor's peak.

    Attributes:
        peaks: The largest finite magnitude of each tensor, by name; for stacked experts, one for each. `peaks_of`
            computes them for a model whose ranks hold parts of matrices. None: they are computed during the put, for
            matrices that are complete in this process.
        dtype: ``torch.float4_e2m1fn_x2``, or ``torch.uint8`` for readers whose parameters have that dtype, such as
            vLLM's: the bits are the same.
        select: Says by name which of the floating-point matrices are quantized; None: all. Give the same function
            every time.
        experts: The same for tensors of three dims, which are stacks of matrices, one for each expert; None: none.

    Raises:
        ValueError: Another dtype.

    Example:
        ```python
        import torch

        from skipper import torchstore
        from skipper.torchstore import sync as ts

        ts.initialize()
        ts.put_state_dict({"w": torch.randn(64, 64)}, "policy", transfer_dtype=torchstore.NVFP4())
        stored = ts.get_state_dict("policy")
        print(stored["w"].shape, stored["w_scale"].shape)  # torch.Size([64, 32]) torch.Size([64, 4])
        mine = {"w": torch.zeros(64, 64)}
        ts.get_state_dict("policy", mine)  # dequantized
        ts.shutdown()
        ```
    """

    format: ClassVar[str] = "NVFP4"
    packed: ClassVar[int] = 2
    scale_suffix: ClassVar[str] = "_scale"
    tensor_suffix: ClassVar[str] = "_scale_2"
    block: ClassVar[Ints] = (1, 16)
    scale_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn

    peaks: Mapping[str, Peak] | None = field(default=None, compare=False)  # of one put; all puts share the buffers
    dtype: torch.dtype = torch.float4_e2m1fn_x2
    select: Callable[[str], bool] | None = None
    experts: Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float4_e2m1fn_x2, torch.uint8):
            raise ValueError(f"transfer_dtype: elements are float4_e2m1fn_x2 or uint8, not {self.dtype}")

    def knows_peak(self, name: str) -> bool:
        """Whether the peaks were given."""
        return self.peaks is not None and name in self.peaks

    def tensor_scale(self, name: str, values: torch.Tensor, matrices: torch.Tensor | None = None) -> torch.Tensor:
        """The tensor's scale, with which a block with the tensor's peak has the largest scale."""
        if self.peaks is not None and name in self.peaks:
            peak = torch.tensor(self.peaks[name], dtype=torch.float32, device=values.device)
            peak = peak if matrices is None else peak[matrices]
        else:
            peak = _peak(values) if matrices is None else _peaks(values)
        scale = peak / (_E2M1_MAX * _E4M3_MAX)
        return torch.where(scale == 0, 1.0, scale)

    def scales(self, peaks: torch.Tensor, tensor_scale: torch.Tensor | None) -> torch.Tensor:
        """The scales, in units of the tensor's scale."""
        scales = (peaks / (_E2M1_MAX * _given(tensor_scale))).clamp(_E4M3_LEAST, _E4M3_MAX)
        return torch.where(peaks.isfinite(), scales, torch.nan).to(torch.float8_e4m3fn)

    def encode(self, ratios: torch.Tensor) -> torch.Tensor:
        """The nearest codes, two per byte."""
        size = ratios.abs()
        codes = torch.signbit(ratios).to(torch.uint8) << 3
        # Halfway between two neighbours, the even code is used: the lower one of 0 and 1, the upper one of 1 and 2.
        for code, (low, high) in enumerate(pairwise(_E2M1)):
            middle = (low + high) / 2
            codes += size >= middle if code % 2 else size > middle
        return (codes[:, 0::2] | codes[:, 1::2] << 4).view(self.dtype)

    @staticmethod
    def factors(scales: torch.Tensor, tensor_scale: torch.Tensor | None) -> torch.Tensor:
        """The product of both scales."""
        return scales.float() * _given(tensor_scale)

    @staticmethod
    def decode(elements: torch.Tensor) -> torch.Tensor:
        """The values, from a table of the 16 codes."""
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=elements.device)
        codes = elements.view(torch.uint8)
        return table[torch.stack((codes & 15, codes >> 4), -1).flatten(1).int()]


def peaks_of(state_dict: Mapping[Any, Any], *, experts: Callable[[str], bool] | None = None) -> dict[str, Peak]:
    """The largest finite magnitude of each floating-point matrix of a state dict, by flattened name.

    ``experts`` is that of the format: for these tensors there is one magnitude for each matrix of the stack.

    For DTensors it is that of the whole tensor: all ranks of their device meshes call this together, with the same
    names, because they exchange one number for each matrix (an all-reduce along each axis of each mesh).

    Returns:
        The value for ``peaks`` of `NVFP4`.
    """
    leaves, _ = flatten(state_dict)
    found: dict[str, torch.Tensor] = {}
    meshes: dict[Any, list[str]] = {}
    for name, leaf in leaves.items():
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            continue
        if leaf.ndim == 2:
            found[name] = _peak(local_of(leaf)).reshape(1)
        elif leaf.ndim == 3 and experts is not None and experts(name):
            found[name] = _peaks_of_stack(name, leaf)
        else:
            continue
        if is_dtensor(leaf):
            meshes.setdefault(leaf.device_mesh, []).append(name)
    for mesh, names in meshes.items():
        if mesh.get_coordinate() is None:
            continue
        both = torch.cat([found[name] for name in names])
        for axis in range(mesh.ndim):
            torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=mesh.get_group(axis))
        found.update(zip(names, torch.split(both, [len(found[name]) for name in names]), strict=True))
    return {name: float(peak) if leaves[name].ndim == 2 else tuple(peak.tolist()) for name, peak in found.items()}


def _peaks_of_stack(name: str, leaf: torch.Tensor) -> torch.Tensor:
    """The peak of each matrix of the whole stack, from the elements in this process; 0 if it has none of a matrix."""
    local = describe(leaf, key=name)
    found = torch.zeros(local.global_shape[0], device=local.tensor.device)
    for piece in local.pieces:
        start, count = piece.box.offsets[0], piece.box.shape[0]
        peaks = _peaks(region(local.tensor, piece.local, piece.box.shape))
        found[start : start + count] = torch.maximum(found[start : start + count], peaks)
    return found


def _peaks(stack: torch.Tensor) -> torch.Tensor:
    return torch.stack([_peak(matrix) for matrix in stack]) if len(stack) else torch.zeros(0, device=stack.device)


def _peak(values: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude; 0 if there is none."""
    peak = torch.zeros((), device=values.device)
    step = max(_STRIP // max(values.shape[-1], 1), 1)
    for start in range(0, values.shape[0], step):
        rows = values[start : start + step].detach()
        if rows.numel():
            size = rows.float().abs()
            peak = torch.maximum(peak, torch.where(size.isfinite(), size, 0.0).amax())
    return peak


def _given(tensor_scale: torch.Tensor | None) -> torch.Tensor:
    assert tensor_scale is not None, "NVFP4 has a scale of the whole tensor"
    return tensor_scale
