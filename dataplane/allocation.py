"""Memory that peers of the same host can map: `empty` for users of torch, `empty_array` for users of numpy."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from skipper.dataplane import process, tensors
from skipper.dataplane._copy import Block
from skipper.dataplane.identity import page_size
from skipper.dataplane.memory import contiguous, require_writable, strided
from skipper.dataplane.regions import HOST

if TYPE_CHECKING:
    from skipper.dataplane.tensors import DType, Tensor


def allocate(nbytes: int) -> Block:
    """A block of the arena; it returns there when the last view of it is deleted.

    Raises:
        RegistrationError: The system has no memory or file descriptor left for it.
    """
    return process.current().arena.allocate(nbytes)


def empty(shape: int | Sequence[int], dtype: "DType | None" = None, *, device: str = "cpu") -> "Tensor":
    """An uninitialised tensor in memory that processes of this host can map: the fastest kind for others to read.

    The memory is anonymous (a memfd): nothing remains of it when this process ends, in any way. It goes back to the
    arena when the last tensor that views it is deleted.

    Args:
        shape: Elements per dimension.
        dtype: torch's default dtype when None.
        device: "cpu", or "cuda[:N]" for plain device memory, which peers reach by UCX.

    Raises:
        RegistrationError: The system has no memory or file descriptor left for it.
        ValueError: A dimension is negative, or the device is neither a CPU nor a GPU.
    """
    return tensors.empty(shape, dtype, device, allocate)


def empty_array(shape: int | Sequence[int], dtype: DTypeLike = np.float64) -> NDArray[Any]:
    """An uninitialised numpy array in memory that processes of this host can map.

    Args:
        shape: Elements per dimension.
        dtype: Any dtype of plain bytes; objects cannot be shared.

    Raises:
        RegistrationError: The system has no memory or file descriptor left for it.
        TypeError: The dtype holds references.
        ValueError: A dimension is negative.
    """
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise TypeError(f"arrays of {dtype} hold references, which are not valid in another process")
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(n < 0 for n in shape):
        raise ValueError(f"shape {shape} has a negative dimension")
    nbytes = dtype.itemsize
    for n in shape:
        nbytes *= n
    if nbytes == 0:
        return np.empty(shape, dtype)
    array: NDArray[Any] = np.frombuffer(memoryview(allocate(nbytes)), dtype=dtype)
    return array.reshape(shape)


def is_shared(data: Any) -> bool:
    """Whether peers of this host can map the memory of `data` (a tensor, an array, a buffer).

    Raises:
        TypeError: It is none of these.
        ValueError: It has no bytes.
    """
    region = strided(data, "data")
    return region.kind is HOST and process.current().arena.locate(region.address, 1) is not None


def release_pages(data: Any) -> int:
    """Return the physical memory of part of an allocation to the system, for every process that maps it.

    The addresses stay valid: they read as zeros, and a write takes new pages.

    Args:
        data: Contiguous memory from `empty` or `empty_array`. Only the pages that it covers completely are returned.

    Returns:
        Bytes returned; 0 for memory from elsewhere.

    Raises:
        TypeError: It is not memory.
        ValueError: It is not contiguous, or has no bytes.
        OSError: The system refused.
    """
    region = contiguous(data, "data")
    found = process.current().arena.locate(region.address, region.nbytes) if region.kind is HOST else None
    if found is None:
        return 0
    mapping, offset = found
    page = page_size()
    begin, end = -(-offset // page) * page, (offset + region.nbytes) // page * page
    if begin >= end:
        return 0
    mapping.memory.remove(begin, end - begin)
    return end - begin


def memcpy(dst: Any, src: Any, *, threads: int = 1, stream: bool = False) -> None:
    """Copy contiguous host memory without holding the GIL: the reference for every other way to move it.

    Args:
        dst: Tensor, array or writable buffer.
        src: The same, with as many bytes; may be read-only.
        threads: Threads that copy a stripe each.
        stream: Whether to bypass the cache, if the processor can: for parts of a copy that would not stay in it.

    Raises:
        TypeError: Not host memory, or not memory at all.
        ValueError: Sizes differ, one is not contiguous or has no bytes, `dst` is read-only, they overlap, or
            `threads` is less than 1.
    """
    target = contiguous(dst, "dst")
    source = contiguous(src, "src")
    require_writable(target, "dst")
    if target.kind is not HOST or source.kind is not HOST:
        raise TypeError("memcpy copies host memory only")
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    if target.nbytes != source.nbytes:
        raise ValueError(f"dst has {target.nbytes} bytes, src {source.nbytes}")
    if target.address < source.address + source.nbytes and source.address < target.address + target.nbytes:
        raise ValueError("dst and src overlap")
    process.current().pool.memcpy(target.address, source.address, target.nbytes, threads, stream=stream)
