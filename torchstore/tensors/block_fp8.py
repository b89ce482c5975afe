"""Block-FP8: matrices are sent as 8-bit floats with one float32 scale for each block.

The format is that of DeepSeek's checkpoints, which vLLM and SGLang load: ``weight`` in ``float8_e4m3fn``, and
``weight_scale_inv`` with the largest magnitude of each 128 x 128 block divided by 448, the largest number of that
dtype. A value is its 8-bit float times the scale of its block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from skipper.torchstore.tensors.quantization import Quantization

_MOST = 1 << 16
"""The maximum number of rows or columns of a block: tensors are padded to whole blocks."""


@dataclass(frozen=True, slots=True)
class BlockFP8(Quantization):
    """``put_state_dict(transfer_dtype=BlockFP8())``: matrices are sent as 8-bit floats with a scale for each block.

    A scale is the block's largest magnitude divided by the largest number of the dtype, and 1 for a block of zeros.
    With ``float8_e4m3fn`` the dequantized value differs from a value x by at most max(abs(x) / 16, scale / 1024), apart
    from the rounding of float32. In a block with an infinity or a NaN, the finite values are lost.

    Attributes:
        block: Rows and columns that share a scale. The shards of the publishers must consist of whole blocks.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        select: Says by name which of the floating-point matrices are quantized; None: all. Checkpoints of this format
            leave embeddings and the output layer as they are. Give the same function every time.
        experts: The same for tensors of three dims, which are stacks of matrices, one for each expert; None: none.

    Raises:
        ValueError: Another dtype, or sizes that are not positive.

    Example:
        ```python
        import torch

        from skipper import torchstore
        from skipper.torchstore import sync as ts

        ts.initialize()
        ts.put_state_dict({"w": torch.randn(256, 128)}, "policy", transfer_dtype=torchstore.BlockFP8())
        stored = ts.get_state_dict("policy")
        print(stored["w"].dtype, tuple(stored["w_scale_inv"].shape))  # torch.float8_e4m3fn (2, 1)
        mine = {"w": torch.empty(256, 128, dtype=torch.bfloat16)}
        ts.get_state_dict("policy", mine)  # dequantized on the way
        ts.shutdown()
        ```
    """

    format: ClassVar[str] = "BlockFP8"
    scale_suffix: ClassVar[str] = "_scale_inv"
    scale_dtype: ClassVar[torch.dtype] = torch.float32

    block: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.float8_e4m3fn
    select: Callable[[str], bool] | None = None
    experts: Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise ValueError(f"transfer_dtype: blocks are float8_e4m3fn or float8_e5m2, not {self.dtype}")
        if len(self.block) != 2 or any(not isinstance(size, int) or not 0 < size <= _MOST for size in self.block):
            raise ValueError(
                f"transfer_dtype: a block has a positive number of rows and columns, at most {_MOST}, not {self.block}"
            )

    def scales(self, peaks: torch.Tensor, tensor_scale: torch.Tensor | None) -> torch.Tensor:
        """Scales with which each block's largest magnitude becomes the largest number of the dtype."""
        return torch.where(peaks == 0, 1.0, peaks / torch.finfo(self.dtype).max)

    def encode(self, ratios: torch.Tensor) -> torch.Tensor:
        """Quantize; rounded like in torch."""
        return ratios.to(self.dtype)

    @staticmethod
    def factors(scales: torch.Tensor, tensor_scale: torch.Tensor | None) -> torch.Tensor:
        """The scales themselves."""
        return scales

    @staticmethod
    def decode(elements: torch.Tensor) -> torch.Tensor:
        """Dequantize, converted like in torch."""
        return elements.float()
