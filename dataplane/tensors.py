"""The only file of this package that knows torch. Only functions that get or make tensors import torch.

Everything that is specific to GPU memory is here: where a tensor is, how its bytes are copied within this process, and
how far the streams of the calling thread are.
"""

import contextlib
import functools
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from skipper.dataplane import cuda_driver
from skipper.dataplane._copy import Block
from skipper.dataplane.errors import BackendUnavailableError, TransferError
from skipper.dataplane.layout import Rows, has_dims, runs_of
from skipper.dataplane.regions import MemoryKind, Region, Storage, StridedRegion

Location = tuple[MemoryKind, int]
"""Kind of memory and index of the device."""

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    Tensor = torch.Tensor
    DType = torch.dtype
    Mark = torch.cuda.Event

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


@functools.cache
def built_for_cuda() -> str | None:
    """The CUDA version that the installed torch was built for, as "13.0"; None without torch, or without CUDA.

    Reads the file in which torch has it: an import of torch takes seconds.
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


def forked_from_cuda() -> bool:
    """Whether CUDA was started before this process was forked: then it cannot be used here. Imports nothing."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())


def start_cuda() -> None:
    """Make torch start CUDA in this process, if it has not.

    Raises:
        BackendUnavailableError: It does not start.
    """
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        raise BackendUnavailableError(f"CUDA does not start: {error}") from error


def current_gpu() -> int:
    """The index of the GPU that the calling thread uses."""
    import torch

    return torch.cuda.current_device()


def require_usable(address: int, device: int) -> None:
    """Check that torch accepts an address as memory that a GPU can use directly.

    Raises:
        BackendUnavailableError: It would copy it, or refuses it.
    """
    try:
        taken = _bytes_of((MemoryKind.CUDA, device), address, 1)
    except RuntimeError as error:
        raise BackendUnavailableError(f"torch cannot use memory that was mapped: {error}") from error
    if taken.data_ptr() != address:
        raise BackendUnavailableError("torch takes mapped memory for the memory of another GPU")


def contiguous(tensor: "torch.Tensor", role: str) -> Region:
    """The memory of a contiguous tensor."""
    kind, device = _placement(tensor, role)
    if not tensor.is_contiguous():
        raise ValueError(f"{role} must be contiguous; shape {tuple(tensor.shape)} has strides {tensor.stride()}")
    return Region(_address(tensor, role), tensor.nbytes, False, kind, device, tensor)


def strided(tensor: "torch.Tensor", role: str) -> StridedRegion:
    """The memory of a tensor of any strides."""
    kind, device = _placement(tensor, role)
    itemsize = tensor.itemsize
    strides = tuple(s * itemsize for s in tensor.stride())
    return StridedRegion(
        _address(tensor, role), tensor.nbytes, False, kind, device, tensor, itemsize, tuple(tensor.shape), strides
    )


def storage_of(tensor: "torch.Tensor") -> Storage:
    """The tensor's storage; its Python object lives as long as the storage does."""
    storage = tensor.untyped_storage()
    return Storage(storage.data_ptr(), storage.nbytes(), storage)


class DeviceRows:
    """Rows of which at least one side is memory of a GPU, ready to be copied again and again.

    The copies do not wait for the work of other streams. Waiting for the device does not hold the GIL.
    """

    def __init__(self, rows: Rows, to_remote: bool, local: Location, remotes: "Sequence[Location]") -> None:
        """Prepare it.

        Args:
            rows: See rows.h; both sides are addresses of this process, whose memory the caller keeps.
            to_remote: The direction.
            local: Kind of memory and device of all local sides.
            remotes: The same of the remote sides, by key.

        Raises:
            ValueError: A stride is negative.
        """
        places = {local, *remotes}
        self._gpus = sorted({device for kind, device in places if kind is MemoryKind.CUDA})
        self._with_host = len(places) > len(self._gpus)
        self._pairs: list[tuple[int, int, int]] = []
        self._views: list[tuple[Tensor, Tensor]] = []
        # The driver begins a plain copy in a tenth of the time that torch takes; torch copies blocks, and between GPUs.
        if len(self._gpus) == 1 and not has_dims(rows):
            self._pairs = [(row[1], row[0], row[2]) if to_remote else (row[0], row[1], row[2]) for row in rows.tolist()]
            return
        for row in rows.tolist():
            key, run, counts, local_strides, remote_strides = runs_of(row)
            unit = _unit(row[0], row[1], run, *local_strides, *remote_strides)
            here = _runs(local, row[0], run, counts, local_strides, unit)
            there = _runs(remotes[key], row[1], run, counts, remote_strides, unit)
            self._views.append((there, here) if to_remote else (here, there))

    def copy(self) -> None:
        """Copy all of it; returns when the bytes have arrived.

        Raises:
            TransferError: The device reports an error, perhaps of a kernel that ran before.
        """
        import torch

        if self._pairs:
            copy(self._pairs, self._gpus[0], with_host=self._with_host)
            return
        try:
            with contextlib.ExitStack() as current:
                for gpu in self._gpus:
                    number = current.enter_context(_own_stream(gpu))
                    stream = torch.cuda.ExternalStream(number, gpu)  # type: ignore[no-untyped-call]
                    current.callback(stream.synchronize)  # also after an error: begun copies must not continue
                    current.enter_context(torch.cuda.stream(stream))
                for target, source in self._views:
                    target.copy_(source, non_blocking=True)
        except (RuntimeError, BackendUnavailableError) as error:
            raise TransferError(f"copying memory of a GPU failed: {error}") from error


def copy(pairs: "Iterable[tuple[int, int, int]]", device: int, *, with_host: bool) -> None:
    """Copy between addresses of one GPU, or of the GPU and the host, like `DeviceRows`.

    Args:
        pairs: Destination, source, and number of bytes of each copy.
        device: The GPU.
        with_host: Whether memory of the host is among them.

    Raises:
        TransferError: The device reports an error, perhaps of a kernel that ran before.
    """
    try:
        with _own_stream(device) as stream:
            cuda_driver.copy(pairs, stream, device, blocks=with_host)
    except BackendUnavailableError as error:
        raise TransferError(f"copying memory of a GPU failed: {error}") from error


def marks(devices: "Iterable[int]") -> "list[Mark]":
    """Marks on the calling thread's current streams of these GPUs, after all the work that is queued there so far.

    Streams without work left get none.

    Raises:
        TransferError: A device reports an error, perhaps of a kernel that ran before.
    """
    import torch

    set_: list[Mark] = []
    try:
        for device in devices:
            stream = torch.cuda.current_stream(device)
            if not stream.query():
                set_.append(stream.record_event())
    except RuntimeError as error:
        raise TransferError(f"GPU {device} reports an error: {error}") from error
    return set_


def reached(mark: "Mark") -> bool:
    """Whether the device has done all the work before a mark. Does not wait.

    Raises:
        TransferError: The device reports an error.
    """
    try:
        return bool(mark.query())  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise TransferError(f"a GPU reports an error of what it was given before the transfer: {error}") from error


class _DeviceMemory:
    """A range of device memory in a form that torch uses without copying (CUDA array interface, version 3)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


_idle_streams: dict[int, list[int]] = {}


@contextlib.contextmanager
def _own_stream(device: int) -> "Iterator[int]":
    """A private stream of a GPU for one copy, as CUDA numbers it. After an error it is not used again."""
    idle = _idle_streams.setdefault(device, [])
    try:
        stream = idle.pop()
    except IndexError:
        stream = cuda_driver.new_stream(device)
    yield stream
    idle.append(stream)


def _unit(*numbers: int) -> int:
    """The largest element, of 1, 2, 4 or 8 bytes, that a copy can be counted in: a GPU copies one by each thread."""
    return next(unit for unit in (8, 4, 2, 1) if not any(number % unit for number in numbers))


def _runs(place: Location, address: int, run: int, counts: list[int], strides: list[int], unit: int) -> "torch.Tensor":
    """Equally long runs as a tensor of integers whose last dimension is the run. It does not own the memory."""
    import torch

    if any(s < 0 for s in strides):
        raise ValueError("device memory cannot be copied through negative strides; make the array contiguous first")
    reach = sum((n - 1) * s for n, s in zip(counts, strides, strict=True)) + run
    element = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[unit]
    whole = _bytes_of(place, address, reach).view(element)
    return whole.as_strided((*counts, run // unit), (*(s // unit for s in strides), 1))


def _bytes_of(place: Location, address: int, nbytes: int) -> "torch.Tensor":
    """Memory as a tensor of bytes, which does not own it."""
    import torch

    kind, device = place
    if kind is MemoryKind.HOST:
        return torch.frombuffer(Block(address, nbytes, None), dtype=torch.uint8)
    return torch.as_tensor(_DeviceMemory(address, nbytes), device=torch.device("cuda", device))


def _address(tensor: "torch.Tensor", role: str) -> int:
    """The address of its first element; refuses a tensor whose storage was freed, as FSDP does."""
    address = tensor.data_ptr()
    # A freed storage begins at address 0. An address above 1 TiB is no offset from there, and needs no further check.
    if address < 1 << 40 and address == tensor.storage_offset() * tensor.itemsize and tensor.nbytes:
        raise ValueError(f"{role} has no memory: the storage of this tensor of {tensor.nbytes} bytes was freed")
    return address


def _placement(tensor: "torch.Tensor", role: str) -> tuple[MemoryKind, int]:
    """Kind and index of the device; refuses tensors whose elements are not in plain memory."""
    import torch

    wrapper = type(tensor) not in (torch.Tensor, torch.nn.Parameter)
    if wrapper and (hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "to_local")):
        raise TypeError(f"{role} is a {type(tensor).__name__}; pass the plain tensor that holds this rank's elements")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{role} has layout {tensor.layout}; only strided tensors have plain memory")
    device = tensor.device
    kind = _KINDS.get(device.type)
    if kind is None:
        raise TypeError(f"{role} is on {device}; only cpu and cuda memory can be moved")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{role} is a lazy conjugate or negative view; resolve it first (resolve_conj, resolve_neg)")
    return kind, device.index or 0
