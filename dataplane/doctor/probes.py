"""Questions to foreign libraries, drivers and the kernel, each asked in a process that may crash or hang.

`ask` runs this file by its path, as ``probes.py NAME [ARGUMENT ...]``: it imports nothing of this project, so that it
starts in milliseconds. The process prints its answer as JSON.
"""

import ctypes
import importlib
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint8, c_uint64, c_ulong, c_void_p
from typing import Any

TIMEOUT_S = 10.0

_PROGRAM = __file__

_CMA_NBYTES = 1 << 16
_CMA_PATTERN = b"\x5a" * _CMA_NBYTES
_CMA_TIMEOUT_S = 5.0
_PR_SET_PTRACER, _ANY = 0x59616D61, c_ulong(-1)  # linux/prctl.h
_DMA_BUF_SUPPORTED, _MAJOR, _MINOR = 124, 75, 76  # enum CUdevice_attribute of cuda.h
_MTUS = (0, 256, 512, 1024, 2048, 4096)  # by enum ibv_mtu
_LOCAL_WRITE = 1  # enum ibv_access_flags
_COUNT, _RESOURCES = 1 << 1, 1 << 2  # enum uct_component_attr_field
_KINDS = ("network", "shared memory", "accelerator", "loopback")  # uct_device_type_t


class ProbeError(Exception):
    """A probe gave no answer; says why in a few words."""


def ask(probe: str, *arguments: str, timeout: float = TIMEOUT_S) -> Any:
    """Run a probe and read the JSON that it prints.

    Args:
        probe: Its name: cma, gpus, imports, ports or transports.
        arguments: For it.
        timeout: Seconds until it is killed.

    Raises:
        ProbeError: It printed no JSON: it was killed by a signal or by the deadline, or failed.
    """
    # -P: the folder of this file is no place to import from.
    command = [sys.executable, "-P", _PROGRAM, probe, *arguments]
    # UCX would write its own complaints to standard output, among the answer.
    environment = {**os.environ, "UCX_LOG_LEVEL": "fatal"}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise ProbeError(f"no answer within {timeout:.3g} s") from error
    except OSError as error:
        raise ProbeError(f"it cannot be asked: {error}") from error
    if done.returncode < 0:
        raise ProbeError(f"killed by signal {-done.returncode}")
    try:
        return json.loads(done.stdout)
    except ValueError as error:
        last = done.stderr.strip().rpartition("\n")[2]
        raise ProbeError(last or f"ended with status {done.returncode}") from error


def _imports(module: str) -> dict[str, Any]:
    """{"file": ...}, or {"error": ...}: a module of a compiled package may fail because a library is missing."""
    try:
        return {"file": getattr(importlib.import_module(module), "__file__", None)}
    except ImportError as error:
        return {"error": str(error)}


class _IoVec(ctypes.Structure):
    _fields_ = (("base", c_void_p), ("nbytes", c_size_t))


def _cma(pid: str = "", address: str = "") -> Any:
    """Whether one process may copy another's memory: without arguments, of this process by a child of it.

    A kernel that restricts ptrace lets only parents read their children. So here the child reads its parent. If each
    process may choose (ptrace_scope 1), the parent permits others to read it, as UCX does.
    """
    if pid:
        return _copied(int(pid), int(address))
    memory = mmap.mmap(-1, _CMA_NBYTES)
    memory.write(_CMA_PATTERN)
    begin = ctypes.addressof(c_char.from_buffer(memory))
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)
    command = [sys.executable, "-P", __file__, "cma", str(os.getpid()), str(begin)]
    return json.loads(subprocess.run(command, check=True, timeout=_CMA_TIMEOUT_S, stdout=subprocess.PIPE).stdout)


def _copied(pid: int, address: int) -> dict[str, int | bool]:
    """Read all of it, write its first byte: {"read": errno or 0, "write": errno or 0, "whole": bytes right}."""
    libc = ctypes.CDLL(None, use_errno=True)
    mine = (c_char * _CMA_NBYTES)()
    answer: dict[str, int | bool] = {}
    for name, length in (("read", _CMA_NBYTES), ("write", 1)):
        call = getattr(libc, f"process_vm_{name}v")
        call.restype = ctypes.c_ssize_t
        local, remote = _IoVec(ctypes.addressof(mine), length), _IoVec(address, length)
        one, none = c_ulong(1), c_ulong(0)
        moved = call(pid, byref(local), one, byref(remote), one, none)
        answer[name] = 0 if moved == length else ctypes.get_errno()
        if answer[name]:
            break
    answer["whole"] = mine.raw == _CMA_PATTERN
    return answer


def _gpus() -> dict[str, Any]:
    """The GPUs that NVIDIA's driver library reports, without a context on any: {"cuda", "gpus"}, or {"error"}."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"error": str(error), "missing": True}
    status = cuda.cuInit(0)
    if status != 0:
        return {"error": f"cuInit: {_cuda_text(cuda, status)}", "missing": False}
    version, count = c_int(), c_int()
    cuda.cuDriverGetVersion(byref(version))
    cuda.cuDeviceGetCount(byref(count))
    major, minor = divmod(version.value, 1000)
    return {"cuda": f"{major}.{minor // 10}", "gpus": [_gpu(cuda, index) for index in range(count.value)]}


def _gpu(cuda: ctypes.CDLL, index: int) -> dict[str, Any]:
    device, name, nbytes = c_int(), ctypes.create_string_buffer(128), c_size_t()
    cuda.cuDeviceGet(byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(byref(nbytes), device)
    return {
        "index": index,
        "name": name.value.decode(),
        "memory_nbytes": nbytes.value,
        "compute_capability": f"{_attribute(cuda, device, _MAJOR)}.{_attribute(cuda, device, _MINOR)}",
        "dmabuf": _attribute(cuda, device, _DMA_BUF_SUPPORTED) == 1,
    }


def _attribute(cuda: ctypes.CDLL, device: c_int, which: int) -> int:
    value = c_int()
    return value.value if cuda.cuDeviceGetAttribute(byref(value), which, device) == 0 else 0


def _cuda_text(cuda: ctypes.CDLL, status: int) -> str:
    text = c_char_p()
    known = cuda.cuGetErrorString(status, byref(text)) == 0 and text.value is not None
    return text.value.decode() if known and text.value else f"status {status}"


class _PortAttributes(ctypes.Structure):
    """The beginning of ``struct ibv_port_attr`` of <infiniband/verbs.h>, whose layout is part of the library's ABI."""

    _fields_ = (("state", c_int), ("max_mtu", c_int), ("active_mtu", c_int), ("rest", c_char * 244))


def _ports(nbytes: str, *ports: str) -> dict[str, Any]:
    """What only libibverbs reports about ports "DEVICE:PORT": the MTU in use, and whether memory can be registered.

    Opens each device, and registers that many bytes of memory once.

    Returns:
        {"DEVICE:PORT": {"active_mtu", "max_mtu", "register": "" or the reason}}, or {"DEVICE:PORT": {"error"}}.
    """
    verbs = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    for name in ("ibv_get_device_list", "ibv_open_device", "ibv_alloc_pd", "ibv_reg_mr"):
        getattr(verbs, name).restype = c_void_p
    verbs.ibv_get_device_name.restype = c_char_p
    memory = mmap.mmap(-1, int(nbytes))
    count = c_int()
    listed = verbs.ibv_get_device_list(byref(count))
    pointers = (c_void_p * count.value).from_address(listed) if listed else ()
    by_name = {verbs.ibv_get_device_name(c_void_p(pointer)).decode(): pointer for pointer in pointers}
    answer = {}
    for port in ports:
        device, _, number = port.rpartition(":")
        pointer = by_name.get(device)
        if pointer is None:
            answer[port] = {"error": "libibverbs has no provider for it"}
        else:
            answer[port] = _port(verbs, pointer, int(number), memory)
    return answer


def _port(verbs: ctypes.CDLL, device: int, number: int, memory: mmap.mmap) -> dict[str, Any]:
    context = verbs.ibv_open_device(c_void_p(device))
    if not context:
        return {"error": f"it cannot be opened: {_reason()}"}
    about = _PortAttributes()
    if verbs.ibv_query_port(c_void_p(context), c_uint8(number), byref(about)) != 0:
        return {"error": f"port {number} does not answer: {_reason()}"}
    domain = verbs.ibv_alloc_pd(c_void_p(context))
    address = ctypes.addressof(c_char.from_buffer(memory))
    region = domain and verbs.ibv_reg_mr(c_void_p(domain), c_void_p(address), c_size_t(len(memory)), _LOCAL_WRITE)
    register = "" if region else _reason()
    return {"active_mtu": _mtu(about.active_mtu), "max_mtu": _mtu(about.max_mtu), "register": register}


def _reason() -> str:
    return os.strerror(ctypes.get_errno())


def _mtu(code: int) -> int | None:
    return _MTUS[code] if 0 < code < len(_MTUS) else None


# Structures of UCX's public header uct/api/uct.h; they are the same in 1.12 to 1.22, as are the calls.
class _Domain(ctypes.Structure):
    _fields_ = (("name", c_char * 16),)


class _Component(ctypes.Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("name", c_char * 16),
        ("count", c_uint),
        ("domains", POINTER(_Domain)),
        ("flags", c_uint64),
    )


class _Resource(ctypes.Structure):
    _fields_ = (("transport", c_char * 10), ("device", c_char * 32), ("kind", c_int), ("system_device", c_uint8))


def _transports(libuct: str) -> list[dict[str, str]]:
    """What UCX sees, [{"transport", "device", "kind"}, ...]: opens no interface, which would listen."""
    uct = ctypes.CDLL(libuct)
    components, count = POINTER(c_void_p)(), c_uint()
    if uct.uct_query_components(byref(components), byref(count)) != 0:
        raise SystemExit("uct_query_components failed")
    return [resource for i in range(count.value) for resource in _resources(uct, c_void_p(components[i]))]


def _resources(uct: ctypes.CDLL, component: c_void_p) -> list[dict[str, str]]:
    about = _Component(field_mask=_COUNT)
    if uct.uct_component_query(component, byref(about)) != 0 or about.count == 0:
        return []
    domains = (_Domain * about.count)()
    about = _Component(field_mask=_RESOURCES, domains=domains)
    if uct.uct_component_query(component, byref(about)) != 0:
        return []
    found = []
    for domain in domains:
        config, opened = c_void_p(), c_void_p()
        if uct.uct_md_config_read(component, None, None, byref(config)) != 0:
            continue
        # The name as a pointer into the array: reading the field would copy it, and the copy may be too short-lived.
        name = c_char_p(domain.name)
        if uct.uct_md_open(component, name, config, byref(opened)) != 0:
            continue
        resources, count = POINTER(_Resource)(), c_uint()
        if uct.uct_md_query_tl_resources(opened, byref(resources), byref(count)) == 0:
            found += [_described(resources[i]) for i in range(count.value)]
    return found


def _described(resource: _Resource) -> dict[str, str]:
    kind = _KINDS[resource.kind] if 0 <= resource.kind < len(_KINDS) else "unknown"
    return {"transport": resource.transport.decode(), "device": resource.device.decode(), "kind": kind}


if __name__ == "__main__":
    _PROBES: dict[str, Callable[..., Any]] = {
        "cma": _cma,
        "gpus": _gpus,
        "imports": _imports,
        "ports": _ports,
        "transports": _transports,
    }
    json.dump(_PROBES[sys.argv[1]](*sys.argv[2:]), sys.stdout)
