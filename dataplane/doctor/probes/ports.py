"""What only libibverbs says: ``ports.py NBYTES [DEVICE:PORT ...]``: the MTU in use; can memory be registered.

Opens each device, asks for the port, and registers NBYTES of memory once. The structure is the beginning of
``struct ibv_port_attr`` of <infiniband/verbs.h>, whose layout is part of the library's ABI.
"""

import ctypes
import json
import mmap
import os
import sys
from typing import Any

_MTUS = (0, 256, 512, 1024, 2048, 4096)  # by enum ibv_mtu
_LOCAL_WRITE = 1  # enum ibv_access_flags


class _PortAttributes(ctypes.Structure):
    _fields_ = (
        ("state", ctypes.c_int),
        ("max_mtu", ctypes.c_int),
        ("active_mtu", ctypes.c_int),
        ("rest", ctypes.c_char * 244),
    )


def main() -> None:
    """Print {"DEVICE:PORT": {"active_mtu", "max_mtu", "register": "" or the reason}} or {... {"error"}}."""
    verbs = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    for name in ("ibv_get_device_list", "ibv_open_device", "ibv_alloc_pd", "ibv_reg_mr"):
        getattr(verbs, name).restype = ctypes.c_void_p
    verbs.ibv_get_device_name.restype = ctypes.c_char_p
    nbytes = int(sys.argv[1])
    memory = mmap.mmap(-1, nbytes)
    count = ctypes.c_int()
    listed = verbs.ibv_get_device_list(ctypes.byref(count))
    pointers = (ctypes.c_void_p * count.value).from_address(listed) if listed else ()
    by_name = {verbs.ibv_get_device_name(ctypes.c_void_p(pointer)).decode(): pointer for pointer in pointers}
    answer = {}
    for port in sys.argv[2:]:
        device, _, number = port.rpartition(":")
        pointer = by_name.get(device)
        answer[port] = {"error": "libibverbs has no provider for it"} if pointer is None else {}
        if pointer is not None:
            answer[port] = _asked(verbs, pointer, int(number), memory, nbytes)
    json.dump(answer, sys.stdout)


def _asked(verbs: ctypes.CDLL, device: int, number: int, memory: mmap.mmap, nbytes: int) -> dict[str, Any]:
    context = verbs.ibv_open_device(ctypes.c_void_p(device))
    if not context:
        return {"error": f"it cannot be opened: {_reason()}"}
    about = _PortAttributes()
    if verbs.ibv_query_port(ctypes.c_void_p(context), ctypes.c_uint8(number), ctypes.byref(about)) != 0:
        return {"error": f"port {number} does not answer: {_reason()}"}
    answer: dict[str, Any] = {"active_mtu": _mtu(about.active_mtu), "max_mtu": _mtu(about.max_mtu)}
    domain = verbs.ibv_alloc_pd(ctypes.c_void_p(context))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    region = domain and verbs.ibv_reg_mr(
        ctypes.c_void_p(domain), ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _LOCAL_WRITE
    )
    answer["register"] = "" if region else _reason()
    return answer


def _reason() -> str:
    return os.strerror(ctypes.get_errno())


def _mtu(code: int) -> int | None:
    return _MTUS[code] if 0 < code < len(_MTUS) else None


if __name__ == "__main__":
    main()
