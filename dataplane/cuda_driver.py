"""Functions of CUDA that torch does not have, or that are many microseconds slower in torch.

Memory of a GPU is exported to other processes of the host (CUDA IPC), and plain copies are made, by calls of the
driver's own library, which exists on every machine with a GPU. Nothing starts before the first call. The contexts are
those that torch uses, too.
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from skipper.dataplane.errors import BackendUnavailableError

IPC_NBYTES = 64
GPU_NBYTES = 16

_LIBRARY = "libcuda.so.1"
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID of cuda.h
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, without which the driver opens nothing

_U64 = ctypes.c_uint64
_Bytes = ctypes.c_ubyte * GPU_NBYTES


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * IPC_NBYTES),)


@dataclass(frozen=True, slots=True)
class SharedAllocation:
    """An allocation of this process, as others find it.

    Attributes:
        ipc: The handle by which the driver maps it, `IPC_NBYTES` long.
        number: A number that no other allocation of this process has had.
        address: Where it begins here.
        gpu: The UUID of its GPU, `GPU_NBYTES` long.
    """

    ipc: bytes
    number: int
    address: int
    gpu: bytes


def missing() -> str | None:
    """Why there is no driver here; None if there is one. Starts nothing."""
    try:
        _library()
    except OSError as error:
        return f"there is no driver of NVIDIA's here ({error})"
    return None


def gpus() -> dict[bytes, int]:
    """The index of each GPU that this process sees, by its UUID.

    Raises:
        BackendUnavailableError: The driver does not answer.
    """
    return {_uuid(device): device for device in range(_count())}


def share(address: int, device: int) -> SharedAllocation:
    """The allocation that contains an address of a GPU's memory.

    Raises:
        BackendUnavailableError: CUDA cannot share it: it comes from a pool or has expandable segments.
    """
    handle, number = _IpcHandle(), _U64()
    with _context(device):
        base, _ = _range(address)
        _call("cuIpcGetMemHandle", ctypes.byref(handle), _U64(base))
        _call("cuPointerGetAttribute", ctypes.byref(number), _BUFFER_ID, _U64(address))
    return SharedAllocation(bytes(handle.reserved), number.value, base, _uuid(device))


def open_shared(ipc: bytes, device: int) -> tuple[int, int]:
    """Map an allocation of another process for one GPU of this one: its address here and its bytes.

    Every mapping has to be closed, also one of an allocation that is mapped already.

    Raises:
        BackendUnavailableError: The driver refuses, for example because of another container, or of a GPU that this one
            cannot reach.
    """
    address = _U64()
    with _context(device):
        handle = _IpcHandle.from_buffer_copy(ipc)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        try:
            return address.value, _range(address.value)[1]
        except BackendUnavailableError:
            _call("cuIpcCloseMemHandle", address)
            raise


def close_shared(address: int, device: int) -> None:
    """Undo one `open_shared`. The memory must not be in use."""
    # The driver is unloaded before the interpreter's last objects, and with it every mapping.
    with contextlib.suppress(BackendUnavailableError), _context(device):
        _call("cuIpcCloseMemHandle", _U64(address))


def new_stream(device: int) -> int:
    """A stream of a GPU that waits for no other, for the life of this process, as CUDA numbers it.

    torch has a pool of 32 streams: one of these may be shared with the caller's kernels, or with NCCL's.

    Raises:
        BackendUnavailableError: There is none.
    """
    stream = ctypes.c_void_p()
    with _context(device):
        _call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
    return stream.value or 0


def copy(pairs: Iterable[tuple[int, int, int]], stream: int, device: int, *, blocks: bool) -> None:
    """Make copies one after another between addresses that a GPU can use, and wait for them.

    Args:
        pairs: Destination, source, and number of bytes of each copy.
        stream: A stream of that GPU, as CUDA numbers it, which has no other work.
        device: The GPU.
        blocks: Whether the call itself copies, as from and to host memory that is not pinned: the GIL is then released
            for the call, too.

    Raises:
        BackendUnavailableError: The GPU reports an error, perhaps of a kernel that ran before.
    """
    begin = (_library() if blocks else _quick_library()).cuMemcpyAsync
    with _context(device):
        try:
            for target, source, nbytes in pairs:
                _require(begin(_U64(target), _U64(source), ctypes.c_size_t(nbytes), _U64(stream)), "cuMemcpyAsync")
        finally:  # copies that have begun must not continue
            _require(_library().cuStreamSynchronize(_U64(stream)), "cuStreamSynchronize")


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(_LIBRARY)


@functools.cache
def _quick_library() -> ctypes.PyDLL:
    """The same for calls that end at once: they keep the GIL, because getting it back may take milliseconds."""
    return ctypes.PyDLL(_LIBRARY)


@functools.cache
def _count() -> int:
    count = ctypes.c_int()
    _call("cuInit", ctypes.c_uint(0))
    _call("cuDeviceGetCount", ctypes.byref(count))
    return count.value


@functools.cache
def _uuid(device: int) -> bytes:
    uuid = _Bytes()
    _call("cuDeviceGetUuid_v2", ctypes.byref(uuid), _device(device))
    return bytes(uuid)


def _device(index: int) -> ctypes.c_int:
    device = ctypes.c_int()
    _call("cuInit", ctypes.c_uint(0))
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    return device


class _Context:
    """The context of a GPU, current in the calling thread."""

    __slots__ = ("_handle",)

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self._handle = handle

    def __enter__(self) -> None:
        _require(_quick_library().cuCtxPushCurrent_v2(self._handle), "cuCtxPushCurrent")

    def __exit__(self, *_: object) -> None:
        _quick_library().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@functools.cache
def _context(device: int) -> _Context:
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _device(device))
    return _Context(context)


def _range(address: int) -> tuple[int, int]:
    base, nbytes = _U64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), _U64(address))
    return base.value, nbytes.value


def _call(name: str, *arguments: Any) -> None:
    _require(getattr(_library(), name)(*arguments), name)


def _require(status: int, name: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(status, ctypes.byref(text))
        why = (text.value or b"unknown error").decode("utf-8", "replace")
        raise BackendUnavailableError(f"CUDA's driver refuses {name}: {why} ({status})")
