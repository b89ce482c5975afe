"""The whole examination, from the machine up to the backends."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from skipper import dataplane
from skipper.dataplane.backends.base import BackendStatus
from skipper.dataplane.doctor import limits
from skipper.dataplane.doctor.checks import Check, Examination, Verdict
from skipper.dataplane.doctor.gpu import gpu
from skipper.dataplane.doctor.rdma import rdma
from skipper.dataplane.doctor.sysfs import Interface, interfaces, rdma_ports
from skipper.dataplane.doctor.trial import TrialError, trial
from skipper.dataplane.doctor.ucx import ucx

_DISTRIBUTIONS = ("skipper-mesh", "libucx-cu12", "numpy", "torch")


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
        statuses["ucx"],
        ucx_library,
        cma=host_facts["cma"],
        ports=ports,
        networks=networks,
        gpus=len(gpu_facts["gpus"]),
    )
    own = [_local(statuses["local"]), _tried("shm"), *ucx_checks[:1], _verbs(statuses["verbs"], needed=active)]
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
        "network": [_interface_facts(item) for item in networks],
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


def _verbs(status: BackendStatus, *, needed: bool) -> Check:
    if status.usable:
        return Check("backends", "verbs", Verdict.OK, status.reason.removesuffix(", not opened yet"))
    if needed:
        advice = "see the checks of rdma below"
        return Check("backends", "verbs", Verdict.PROBLEM, f"not usable: {status.reason}", advice)
    return Check("backends", "verbs", Verdict.ABSENT, "not usable: no RDMA port is active here")


def _network(item: Interface) -> Check:
    speed = "" if item.gbit_per_s is None else f", {item.gbit_per_s:g} Gb/s{' (nominal)' if item.software else ''}"
    if item.gbit_per_s is None and not item.software:
        speed = ", speed not stated by its driver"
    return Check("network", item.name, Verdict.OK, f"{item.state}, MTU {item.mtu}{speed}")


def _interface_facts(item: Interface) -> dict[str, Any]:
    return {name: getattr(item, name) for name in ("name", "state", "gbit_per_s", "mtu", "software")}


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
    """The same, those of one area together, areas in the order in which they first come."""
    areas = list(dict.fromkeys(check.area for check in checks))
    return sorted(checks, key=lambda check: areas.index(check.area))
