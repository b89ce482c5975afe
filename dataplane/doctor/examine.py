"""The whole examination, from the machine up to the backends."""

import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from skipper import dataplane
from skipper.dataplane.backends.base import BackendStatus
from skipper.dataplane.backends.ucx.wheels import WHEELS
from skipper.dataplane.doctor import limits
from skipper.dataplane.doctor.checks import Check, Examination, Verdict
from skipper.dataplane.doctor.devices import gpu, rdma
from skipper.dataplane.doctor.sysfs import Interface, interfaces, rdma_ports
from skipper.dataplane.doctor.ucx import ucx

_DISTRIBUTIONS = ("skipper-mesh", *WHEELS.values(), "numpy", "torch")
_NBYTES = 1 << 20
_BYTE = 0x5A
_TIMEOUT_S = 20.0
_TRANSFER_S = 10.0


def examine(*, ucx_library: str | None = None, trials: bool = False) -> Examination:
    """Look at everything; takes a second or two.

    Shared memory is always tried for real, between this process and one of its own.

    Args:
        ucx_library: Look at this libucp.so.0 in place of the wheel's; as for `dataplane.configure`.
        trials: Try the other usable backends as well. UCX and verbs listen on the loopback while that runs.
    """
    if ucx_library is not None:
        dataplane.configure(ucx_library=ucx_library)
    statuses = {status.name: status for status in dataplane.backends()}
    ports, networks = rdma_ports(), interfaces()
    active = any(port.state == "ACTIVE" for port in ports)

    host_checks, host_facts = limits.within_host()
    memory_checks, memory_facts = limits.memory()
    memlock_check, memlock_facts = limits.memlock(needed=bool(ports))
    rdma_checks, rdma_facts = rdma()
    gpu_checks, gpu_facts = gpu(rdma=bool(ports))
    ucx_checks, ucx_facts = ucx(
        statuses["ucx"], ucx_library, cma=host_facts["cma"], ports=ports, networks=networks, gpus=len(gpu_facts["gpus"])
    )
    own = [_local(statuses["local"]), _tried("shm"), _cuda_ipc(statuses["cuda_ipc"]), *ucx_checks[:1]]
    own.append(_verbs(statuses["verbs"], needed=active))
    if trials:
        own += [_tried(name, ucx_library) for name in ("ucx", "verbs") if statuses[name].usable]
    checks = [
        *own,
        *ucx_checks[1:],
        *host_checks,
        *memory_checks,
        memlock_check,
        *(_network(item) for item in networks if item.state != "down"),
        *rdma_checks,
        *gpu_checks,
    ]
    facts = {
        "system": _system(),
        "limits": {**host_facts, **memory_facts, **memlock_facts},
        "network": [asdict(item) for item in networks],
        "rdma": rdma_facts,
        "ucx": ucx_facts,
        "gpu": gpu_facts,
    }
    return Examination(_by_area(checks), facts)


def _local(status: BackendStatus) -> Check:
    return Check("backends", status.name, Verdict.OK if status.usable else Verdict.PROBLEM, status.reason or "memcpy")


def _tried(backend: str, ucx_library: str | None = None) -> Check:
    name = backend if backend == "shm" else f"{backend}, tried"
    try:
        took_ms = trial(backend, ucx_library=ucx_library)
    except TrialError as error:
        advice = "see the checks below of what it needs"
        return Check("backends", name, Verdict.PROBLEM, f"moving 1 MiB between two processes fails: {error}", advice)
    return Check("backends", name, Verdict.OK, f"1 MiB from another process is right; first use {took_ms:.3g} ms")


def _cuda_ipc(status: BackendStatus) -> Check:
    if status.usable:
        return Check("backends", status.name, Verdict.OK, status.reason)
    return Check("backends", status.name, Verdict.ABSENT, f"not usable: {status.reason}")


def _verbs(status: BackendStatus, *, needed: bool) -> Check:
    if status.usable:
        return Check("backends", "verbs", Verdict.OK, status.reason.removesuffix(", not opened yet"))
    if needed:
        advice = "see the checks of rdma below"
        return Check("backends", "verbs", Verdict.PROBLEM, f"not usable: {status.reason}", advice)
    return Check("backends", "verbs", Verdict.ABSENT, "not usable: no RDMA port is active")


def _network(item: Interface) -> Check:
    speed = "" if item.gbit_per_s is None else f", {item.gbit_per_s:g} Gb/s{' (nominal)' if item.software else ''}"
    if item.gbit_per_s is None and not item.software:
        speed = ", speed not stated by its driver"
    return Check("network", item.name, Verdict.OK, f"{item.state}, MTU {item.mtu}{speed}")


def _system() -> dict[str, Any]:
    return {
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "packages": {name: _version(name) for name in _DISTRIBUTIONS},
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _by_area(checks: Sequence[Check]) -> list[Check]:
    """The same checks, grouped by area, areas in the order of their first checks."""
    areas = list(dict.fromkeys(check.area for check in checks))
    return sorted(checks, key=lambda check: areas.index(check.area))


class TrialError(Exception):
    """The backend did not deliver; says why."""


def trial(backend: str, *, ucx_library: str | None = None) -> float:
    """Start an owner, read its buffer, compare.

    Args:
        backend: "shm", "ucx" or "verbs". UCX and verbs listen for peers of this host while it runs, shm does not.
        ucx_library: What the owner is to use, as this process does.

    Returns:
        Milliseconds of the first read, connecting included.

    Raises:
        TrialError: An error of the data plane or the other process, wrong bytes, or the deadline.
    """
    command = [sys.executable, "-m", "skipper.dataplane.doctor.trial_owner", backend, str(_NBYTES)]
    command += [] if ucx_library is None else [ucx_library]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as owner:
        deadline = threading.Timer(_TIMEOUT_S, owner.kill)
        deadline.daemon = True
        deadline.start()
        try:
            return _read(backend, owner)
        finally:
            deadline.cancel()
            owner.kill()


def _read(backend: str, owner: subprocess.Popen[str]) -> float:
    handle = owner.stdout.readline().strip() if owner.stdout is not None else ""
    if not handle:
        said = owner.stderr.read().strip() if owner.stderr is not None else ""
        raise TrialError(said.rpartition("\n")[2] or f"the owner did not answer within {_TIMEOUT_S:.0f} s")
    dataplane.configure(backend=backend)
    mine = np.zeros(_NBYTES, np.uint8)
    begin = time.perf_counter()
    try:
        dataplane.RDMABuffer.deserialize(bytes.fromhex(handle)).read_into(mine, timeout=_TRANSFER_S).get()
    except dataplane.DataplaneError as error:
        raise TrialError(f"{type(error).__name__}: {error}") from error
    finally:
        dataplane.configure(backend="auto")
    took_ms = (time.perf_counter() - begin) * 1e3
    if not (mine == _BYTE).all():
        raise TrialError("what was read is not what the owner wrote")
    return took_ms
