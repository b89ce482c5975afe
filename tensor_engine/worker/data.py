"""The worker's side of moving the bytes of tensors between the script and a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from skipper.dataplane import RDMABuffer
from skipper.tensor_engine.worker.calls import FunctionCall
from skipper.tensor_engine.worker.device import local
from skipper.tensor_engine.worker.interpreter import Interpreter

_TIMEOUT_S = 60.0


def receive(worker: Interpreter, call: FunctionCall, inputs: Sequence[Any], constant: bytes) -> list[torch.Tensor]:
    """Make a tensor from the bytes that the script has sent."""
    dtype, shape, device = call.static
    return [tensor_of(constant, dtype, shape).to(local(torch.device(device)))]


def place(worker: Interpreter, call: FunctionCall, inputs: Sequence[Any], constant: None) -> list[torch.Tensor]:
    """Make a scalar: the coordinate of this worker along an axis."""
    return [torch.tensor(dict(call.static)[worker.rank])]


def tensor_of(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A plain tensor in memory of its own, even while a mesh is active."""
    memory = bytearray(data)
    if memory and len(shape) == 1:
        return torch.frombuffer(memory, dtype=dtype)  # it is not intercepted
    if not torch._C._len_torch_dispatch_stack():
        return _shaped(memory, dtype, tuple(shape))
    with torch._C._DisableTorchDispatch():  # interception by the mesh takes longer than making it
        return _shaped(memory, dtype, tuple(shape))


def _shaped(memory: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not memory:
        return torch.empty(shape, dtype=dtype)
    if (of_numpy := _OF_NUMPY.get(dtype)) is not None:  # it takes half the time
        return torch.from_numpy(np.ndarray(shape, of_numpy, memory))
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor on any device, in row-major order."""
    if tensor.dtype in _OF_NUMPY:
        return tensor.numpy(force=True).tobytes()
    plain = tensor.detach().resolve_conj().resolve_neg()
    return _on_host(plain).flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""


_OF_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
}


def small(worker: Interpreter, value: Any, argument: None) -> Any:
    """A value for the script: the bytes of a tensor, everything else unchanged."""
    return bytes_of(value) if isinstance(value, torch.Tensor) else value


def is_there(worker: Interpreter, value: Any, argument: None) -> bool:
    """Whether the worker has a value. For poison, `Worker.ask` has already answered with that."""
    return value is not None


def large(worker: Interpreter, value: Any, destination: RDMABuffer) -> Any:
    """Write a tensor into memory of the script, which waits for that; a value that is not a tensor is returned."""
    if not isinstance(value, torch.Tensor):
        return value
    source = _on_host(value.detach().resolve_conj().resolve_neg(), pinned=True)
    destination.write_from(source, timeout=_TIMEOUT_S).get()
    return b""


def _on_host(tensor: torch.Tensor, *, pinned: bool = False) -> torch.Tensor:
    """A contiguous tensor on the CPU. A GPU writes faster into pinned memory, which torch keeps for later ones."""
    if pinned and tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return tensor.to("cpu").contiguous()
