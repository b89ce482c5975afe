"""GPU memory registered with RDMA devices: as a dma-buf, else through nvidia-peermem, else not at all.

The CUDA driver hands out a dma-buf for a range of device memory, the kernel's own way of sharing memory between
devices. Older systems have the module nvidia-peermem instead, with which a device address can be registered as if it
were one of the host. What stands in the way of either is told, so that whoever falls back to host memory can say why.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from skipper.dataplane.backends.verbs.device import Access, Device
from skipper.dataplane.errors import RegistrationError
from skipper.dataplane.identity import page_size

_DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_PEERMEM = (
    Path("/sys/kernel/mm/memory_peers/nvidia-peermem"),
    Path("/sys/kernel/mm/memory_peers/nv_mem"),
    Path("/sys/module/nvidia_peermem"),
)


def register_cuda(
    devices: Sequence[Device], address: int, nbytes: int, cuda_device: int, access: Access
) -> tuple[list[Any], int]:
    """Memory regions of a range of GPU memory, one per device, and its first byte as requests count it.

    Args:
        devices: RDMA devices to register it with.
        address: Virtual device address.
        nbytes: Length.
        cuda_device: Index of the GPU.
        access: What the regions may be used for.

    Raises:
        RegistrationError: Neither way works; says why not, for each.
    """
    try:
        fd, offset = export_dmabuf(address, nbytes, cuda_device)
        try:
            return [device.register_dmabuf(fd, offset, nbytes, access) for device in devices], offset
        finally:
            os.close(fd)  # the regions keep the dma-buf itself
    except RegistrationError as error:
        obstacle = f"as a dma-buf: {error}"
    if not any(path.exists() for path in _PEERMEM):
        raise RegistrationError(f"GPU memory cannot be registered {obstacle}; the module nvidia-peermem is not loaded")
    try:
        return [device.register(address, nbytes, access) for device in devices], address
    except RegistrationError as error:
        raise RegistrationError(
            f"GPU memory cannot be registered {obstacle}; through nvidia-peermem: {error}"
        ) from error


def export_dmabuf(address: int, nbytes: int, cuda_device: int) -> tuple[int, int]:
    """A dma-buf that holds a range of GPU memory: its file descriptor, to be closed, and where in it the range begins.

    Raises:
        RegistrationError: There is no CUDA driver, or it cannot.
    """
    driver = _driver()
    device, supported, fd = ctypes.c_int(-1), ctypes.c_int(0), ctypes.c_int(-1)
    _require(driver.cuDeviceGet(ctypes.byref(device), cuda_device), f"for GPU {cuda_device}")
    _require(driver.cuDeviceGetAttribute(ctypes.byref(supported), _DMA_BUF_SUPPORTED, device), "about dma-buf")
    if not supported.value:
        raise RegistrationError(f"GPU {cuda_device} does not support dma-buf (it needs the open kernel modules)")
    page = page_size()
    begin, end = address // page * page, -(-(address + nbytes) // page) * page
    span = ctypes.c_uint64(begin), ctypes.c_size_t(end - begin)
    with _context(driver, device):
        _require(
            driver.cuMemGetHandleForAddressRange(ctypes.byref(fd), *span, _DMA_BUF_FD, ctypes.c_uint64(0)),
            f"to export {nbytes} bytes",
        )
    return fd.value, address - begin


@contextlib.contextmanager
def _context(driver: Any, device: ctypes.c_int) -> Iterator[None]:
    """Have the context that torch's memory lies in: a thread that has not used the GPU itself has none."""
    context, before = ctypes.c_void_p(), ctypes.c_void_p()
    _require(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "for a context")
    try:
        _require(driver.cuCtxPushCurrent_v2(context), "to use a context")
        try:
            yield
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(before))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)


@functools.cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuMemGetHandleForAddressRange  # noqa: B018 - of CUDA 11.7 and newer, as are all others that are used
    except (OSError, AttributeError) as error:
        raise RegistrationError(f"the CUDA driver cannot export it: {error}") from None
    _require(driver.cuInit(0), "to start")
    return driver


def _require(result: int, what: str) -> None:
    if result:
        raise RegistrationError(f"the CUDA driver fails with {result} when asked {what}")
