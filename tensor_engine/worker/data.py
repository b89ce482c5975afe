"""Bytes of tensors between the script and a worker, the worker's side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from skipper.dataplane import RDMABuffer
from skipper.tensor_engine.worker.calls import FunctionCall
from skipper.tensor_engine.worker.device import local
from skipper.tensor_engine.worker.interpreter import Interpreter

_TIMEOUT_S = 60.0


def receive(worker: Interpreter, call: FunctionCall, inputs: Sequence[Any], constant: bytes) -> list[torch.Tensor]:
    """Make a tensor of the bytes that the script has sent."""
    dtype, shape, device = call.static
    return [tensor_of(constant, dtype, shape).to(local(torch.device(device)))]


def place(worker: Interpreter, call: FunctionCall, inputs: Sequence[Any], constant: None) -> list[torch.Tensor]:
    """Make a scalar: the coordinate of this worker along an axis."""
    return [torch.tensor(dict(call.static)[worker.rank])]


def tensor_of(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor in memory of its own."""
    if not data:
        return torch.empty(tuple(shape), dtype=dtype)
    flat = torch.frombuffer(bytearray(data), dtype=dtype)
    return flat if len(shape) == 1 else flat.view(tuple(shape))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor on any device, in row-major order."""
    if tensor.dtype in _OF_NUMPY:
        return tensor.numpy(force=True).tobytes()
    plain = tensor.detach().resolve_conj().resolve_neg()
    return _on_host(plain).flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""


_OF_NUMPY = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8})


def small(worker: Interpreter, value: Any, argument: None) -> Any:
    """A value for the script: of a tensor its bytes, everything else as it is."""
    return bytes_of(value) if isinstance(value, torch.Tensor) else value


def is_there(worker: Interpreter, value: Any, argument: None) -> bool:
    """Whether the worker has a value. If it has poison, `Worker.ask` has answered with that."""
    return value is not None


def large(worker: Interpreter, value: Any, destination: RDMABuffer) -> Any:
    """Write a tensor into memory of the script, which waits meanwhile; a value that is no tensor is returned."""
    if not isinstance(value, torch.Tensor):
        return value
    source = _on_host(value.detach().resolve_conj().resolve_neg(), pinned=True)
    destination.write_from(source, timeout=_TIMEOUT_S).get()
    return b""


def _on_host(tensor: torch.Tensor, *, pinned: bool = False) -> torch.Tensor:
    """A contiguous tensor on the CPU. A GPU writes faster into pinned memory, and torch keeps that for later ones."""
    if pinned and tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return tensor.to("cpu").contiguous()
