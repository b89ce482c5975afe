"""The GPUs as NVIDIA's driver library sees them: ``gpus.py``. Creates no context on any of them."""

import ctypes
import json
import sys
from typing import Any

_DMA_BUF_SUPPORTED, _MAJOR, _MINOR = 124, 75, 76  # enum CUdevice_attribute of cuda.h


def main() -> None:
    """Print {"driver": version, "gpus": [...]}, or {"error": ...}."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        json.dump({"error": str(error), "missing": True}, sys.stdout)
        return
    status = cuda.cuInit(0)
    if status != 0:
        json.dump({"error": f"cuInit: {_text(cuda, status)}", "missing": False}, sys.stdout)
        return
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    major, minor = divmod(version.value, 1000)
    gpus = [_described(cuda, index) for index in range(count.value)]
    json.dump({"cuda": f"{major}.{minor // 10}", "gpus": gpus}, sys.stdout)


def _described(cuda: ctypes.CDLL, index: int) -> dict[str, Any]:
    device, name, nbytes = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(nbytes), device)
    return {
        "index": index,
        "name": name.value.decode(),
        "memory_nbytes": nbytes.value,
        "compute_capability": f"{_attribute(cuda, device, _MAJOR)}.{_attribute(cuda, device, _MINOR)}",
        "dmabuf": _attribute(cuda, device, _DMA_BUF_SUPPORTED) == 1,
    }


def _attribute(cuda: ctypes.CDLL, device: ctypes.c_int, which: int) -> int:
    value = ctypes.c_int()
    return value.value if cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device) == 0 else 0


def _text(cuda: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    known = cuda.cuGetErrorString(status, ctypes.byref(text)) == 0 and text.value is not None
    return text.value.decode() if known and text.value else f"status {status}"


if __name__ == "__main__":
    main()
