"""The only file of this package that knows torch. Only functions that get or make tensors import torch."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from skipper.dataplane._copy import Block
from skipper.dataplane.layout import Rows, runs_of
from skipper.dataplane.regions import MemoryKind, Region, Storage, StridedRegion

Location = tuple[MemoryKind, int]
"""Kind of memory and index of the device."""

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    Tensor = torch.Tensor
    DType = torch.dtype

_KINDS = {"cpu": MemoryKind.HOST, "cuda": MemoryKind.CUDA}


def empty(
    shape: "int | Sequence[int]", dtype: "torch.dtype | None", device: str, allocate: "Callable[[int], Block]"
) -> "torch.Tensor":
    """See `allocation.empty`; host memory comes from `allocate`, which takes a number of bytes."""
    import torch

    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = dtype or torch.get_default_dtype()
    target = torch.device(device)
    if target.type == "cuda":
        return torch.empty(shape, dtype=dtype, device=target)
    if target.type != "cpu":
        raise ValueError(f"device must be cpu or cuda, not {device}")
    if any(n < 0 for n in shape):
        raise ValueError(f"shape {shape} has a negative dimension")
    numel = 1
    for n in shape:
        numel *= n
    if numel == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(allocate(numel * dtype.itemsize), dtype=dtype, count=numel).view(shape)


def built_for_cuda() -> str | None:
    """The CUDA that the installed torch was built for, as "13.0"; None without torch, or where that is for no CUDA.

    Reads the file in which torch says so: to import all of it takes seconds.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    path = Path(torch.origin).with_name("version.py")
    spec = importlib.util.spec_from_file_location("torch.version", path)
    if not path.exists() or spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cuda: str | None = getattr(module, "cuda", None)
    return cuda


def contiguous(tensor: "torch.Tensor", role: str) -> Region:
    """The memory of a contiguous tensor."""
    kind, device = _placement(tensor, role)
    if not tensor.is_contiguous():
        raise ValueError(f"{role} must be contiguous; shape {tuple(tensor.shape)} has strides {tensor.stride()}")
    return Region(tensor.data_ptr(), tensor.nbytes, False, kind, device, tensor)


def strided(tensor: "torch.Tensor", role: str) -> StridedRegion:
    """The memory of a tensor of any strides."""
    kind, device = _placement(tensor, role)
    itemsize = tensor.itemsize
    strides = tuple(s * itemsize for s in tensor.stride())
    return StridedRegion(
        tensor.data_ptr(), tensor.nbytes, False, kind, device, tensor, itemsize, tuple(tensor.shape), strides
    )


def storage_of(tensor: "torch.Tensor") -> Storage:
    """The tensor's storage; its Python object lives as long as the storage does."""
    storage = tensor.untyped_storage()
    return Storage(storage.data_ptr(), storage.nbytes(), storage)


def copy_rows(rows: Rows, to_remote: bool, local: Location, remotes: "Sequence[Location]") -> None:
    """Copy rows of which at least one side is device memory of this process; returns when the bytes are there.

    Args:
        rows: See rows.h; both sides are addresses of this process.
        to_remote: The direction.
        local: Where all local sides lie.
        remotes: Where the remote sides lie, by key.
    """
    import torch

    places = {local, *remotes}
    for row in rows.tolist():
        key, run, counts, local_strides, remote_strides = runs_of(row)
        here = _runs(local, row[0], run, counts, local_strides)
        there = _runs(remotes[key], row[1], run, counts, remote_strides)
        (there if to_remote else here).copy_(here if to_remote else there, non_blocking=True)
    for kind, device in places:
        if kind is MemoryKind.CUDA:
            torch.cuda.current_stream(device).synchronize()


class _DeviceMemory:
    """A range of device memory in the form that torch takes over without copying (CUDA array interface, version 3)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _runs(place: Location, address: int, run: int, counts: list[int], strides: list[int]) -> "torch.Tensor":
    """Equally long runs as a uint8 tensor whose last dimension is the run. It does not own the memory."""
    import torch

    if any(s < 0 for s in strides):
        raise ValueError("device memory cannot be copied through negative strides; make the array contiguous first")
    reach = sum((n - 1) * s for n, s in zip(counts, strides, strict=True)) + run
    kind, device = place
    if kind is MemoryKind.HOST:
        base = torch.frombuffer(Block(address, reach, None), dtype=torch.uint8)
    else:
        base = torch.as_tensor(_DeviceMemory(address, reach), device=torch.device("cuda", device))
    return base.as_strided((*counts, run), (*strides, 1))


def _placement(tensor: "torch.Tensor", role: str) -> tuple[MemoryKind, int]:
    """Kind and index of the device, after refusing tensors whose elements are not simply there."""
    import torch

    wrapper = type(tensor) not in (torch.Tensor, torch.nn.Parameter)
    if wrapper and (hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "to_local")):
        raise TypeError(f"{role} is a {type(tensor).__name__}; pass the plain tensor that holds this rank's elements")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{role} has layout {tensor.layout}; only strided tensors have plain memory")
    device = tensor.device
    kind = _KINDS.get(device.type)
    if kind is None:
        raise TypeError(f"{role} lies on {device}; only cpu and cuda memory can be moved")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{role} is a lazy conjugate or negative view; resolve it first (resolve_conj, resolve_neg)")
    return kind, device.index or 0
