"""UCX: which library, its version, the transports and devices that it sees, and the ones that it would use."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skipper.dataplane.backends.base import BackendStatus
from skipper.dataplane.backends.ucx.engine import find_library, load
from skipper.dataplane.backends.ucx.wheels import UcxWheels, installed_wheels
from skipper.dataplane.doctor.checks import Check, Verdict
from skipper.dataplane.doctor.probes import ProbeError, ask
from skipper.dataplane.doctor.sysfs import Interface, RdmaPort

_TRIED = ((1, 13), (1, 22))

Facts = dict[str, Any]
Resources = list[dict[str, str]]

_RDMA = ("rc_verbs", "rc_mlx5", "dc_mlx5", "ud_verbs", "ud_mlx5")


def ucx(
    status: BackendStatus,
    library: str | None,
    *,
    cma: bool,
    ports: Sequence[RdmaPort],
    networks: Sequence[Interface],
    gpus: int,
) -> tuple[list[Check], Facts]:
    """Examine UCX.

    Args:
        status: What the backend reports about itself.
        library: As for `dataplane.configure(ucx_library=)`.
        cma: Processes may copy each other's memory here.
        ports: RDMA ports of this machine.
        networks: Its network interfaces.
        gpus: How many GPUs the driver sees.
    """
    wheels = installed_wheels()
    facts: Facts = {"usable": status.usable, "reason": status.reason, "library": find_library(library)}
    facts |= {"wheels": wheels.installed, "torch_cuda": wheels.cuda}
    if not status.usable:
        return [_unusable(status.reason, library, wheels)], facts
    binding = load(find_library(library))
    own = [
        Check("backends", "ucx", Verdict.OK, status.reason.removesuffix(", not started")),
        of_version(binding.library_version(), guarded=binding.guard()),
        of_bells(guarded=binding.guard_bells()),
    ]
    if library is None and wheels.installed:
        own.append(of_wheels(wheels))
    try:
        resources: Resources = ask("transports", _libuct(find_library(library)))
    except ProbeError as error:
        found = f"libuct does not say what it sees: {error}"
        return [*own, Check("backends", "ucx transports", Verdict.WARNING, found)], facts
    names = list(dict.fromkeys(item["transport"] for item in resources))
    used = devices_used()
    facts |= {"transports": names, "resources": resources, "net_devices": used}
    checks = [*own, _transports(names, cma=cma, rdma=any(port.state == "ACTIVE" for port in ports), gpus=gpus)]
    return [*checks, _devices(used, resources, networks)], facts


def _unusable(reason: str, library: str | None, wheels: UcxWheels) -> Check:
    if library is None and not wheels.installed:
        found = "not installed: memory that dataplane.empty did not make, and other hosts, cannot be reached by it"
        advice = f"{wheels.command}   (or name a libucp.so.0: --ucx-library PATH)"
        return Check("backends", "ucx", Verdict.WARNING, found, advice)
    advice = wheels.command if library is None else "name a libucp.so.0 that is there, or none"
    return Check("backends", "ucx", Verdict.PROBLEM, reason, advice)


def of_wheels(wheels: UcxWheels) -> Check:
    """Whether the wheel that brings UCX is the only one, and the one for torch's CUDA; at least one is installed."""
    found = " and ".join(f"{name} {version}" for name, version in wheels.installed.items())
    if len(wheels.installed) > 1:
        found += ": they hold the same files, the later has overwritten the other, and to remove one removes both"
        return Check("backends", "ucx wheel", Verdict.WARNING, found, wheels.command)
    if wheels.cuda is None:
        return Check("backends", "ucx wheel", Verdict.OK, f"{found}; torch is here without CUDA, where each will do")
    if not wheels.for_torch:
        found += f": there is none for the CUDA {wheels.cuda} of torch, and the two were never tested together"
        return Check("backends", "ucx wheel", Verdict.WARNING, found)
    if wheels.fitting not in wheels.installed:
        found += f" with a torch for CUDA {wheels.cuda}: each brings its own CUDA, and they were never tested together"
        return Check("backends", "ucx wheel", Verdict.WARNING, found, wheels.command)
    return Check("backends", "ucx wheel", Verdict.OK, f"{found}, for the CUDA {wheels.cuda} of torch")


def of_version(version: tuple[int, int, int], *, guarded: bool | None) -> Check:
    """Whether Skipper is tried with a version of UCX.

    Args:
        version: As UCX reports it.
        guarded: Whether the guard against its known fault is active (see `ucp_guard.h`); None if it needs none.
    """
    name = ".".join(map(str, version))
    if version[:2] not in _TRIED:
        tried = " and ".join(".".join(map(str, each)) for each in _TRIED)
        found = f"{name} was not tried with Skipper ({tried} were); the guard against a fault of 1.22 is not active"
        return Check("backends", "ucx version", Verdict.WARNING, found, installed_wheels().command)
    if guarded is None:
        return Check("backends", "ucx version", Verdict.OK, f"{name}, tried with Skipper")
    if not guarded:
        found = f"the guard is not active in this {name}: a reader that is killed while it connects may crash an owner"
        return Check("backends", "ucx version", Verdict.WARNING, found, installed_wheels().command)
    found = f"{name}, tested with Skipper; the guard against its known fault is active"
    return Check("backends", "ucx version", Verdict.OK, found)


def of_bells(*, guarded: bool) -> Check:
    """Whether the sockets by which UCX's workers wake each other are guarded (see `ucp_guard.h`)."""
    if guarded:
        found = "an empty datagram from another user ends no process"
        return Check("backends", "ucx bells", Verdict.OK, found)
    found = "not guarded in this UCX: an empty datagram from any user of the host can end a process that uses it"
    return Check("backends", "ucx bells", Verdict.WARNING, found, installed_wheels().command)


def devices_used() -> list[str]:
    """Network devices that UCX is configured to use: those of UCX_NET_DEVICES, else lo, without TCP."""
    return [name for name in os.environ.get("UCX_NET_DEVICES", "lo").split(",") if name]


def _libuct(libucp: str) -> str:
    """The libuct of the same installation as that libucp."""
    folder = Path(libucp).parent
    return str(folder / "libuct.so.0") if str(folder) != "." else "libuct.so.0"


def _transports(names: Sequence[str], *, cma: bool, rdma: bool, gpus: int) -> Check:
    found = ", ".join(names)
    if cma and "cma" not in names:
        advice = "use a UCX that was built with --enable-cma, as those of the wheels are"
        return Check("backends", "ucx transports", Verdict.WARNING, f"{found}; no cma: slow within a host", advice)
    if gpus and not any(name.startswith("cuda") for name in names):
        advice = "use a UCX that was built with CUDA, as those of the wheels are"
        return Check("backends", "ucx transports", Verdict.WARNING, f"{found}; nothing for CUDA memory", advice)
    if rdma and not any(name in _RDMA for name in names):
        system = f"/usr/lib/{platform.machine()}-linux-gnu/libucp.so.0"
        advice = f"use the verbs backend, or a UCX with IB: --ucx-library {system}"
        return Check("backends", "ucx transports", Verdict.OK, f"{found}; nothing for the RDMA device", advice)
    return Check("backends", "ucx transports", Verdict.OK, found)


def _devices(used: Sequence[str], resources: Resources, networks: Sequence[Interface]) -> Check:
    seen = {item["device"] for item in resources if item["kind"] == "network"}
    missing = [name for name in used if name != "all" and name not in seen]
    others = ", ".join(sorted(seen - {"lo"})) or "none"
    if missing:
        found = f"UCX_NET_DEVICES names {', '.join(missing)}, and UCX sees {', '.join(sorted(seen)) or 'none'}"
        return Check("network", "ucx devices", Verdict.PROBLEM, found, "name one of those, or unset UCX_NET_DEVICES")
    if used == ["lo"]:
        advice = ""
        if seen - {"lo"}:
            # A port of an RDMA device is named DEVICE:PORT; it is the better choice.
            best = [name for name in sorted(seen) if ":" in name]
            best += [item.name for item in networks if item.state == "up" and item.name in seen]
            example = (best or sorted(seen - {"lo"}))[0]
            advice = f"to reach other hosts: dataplane.configure(ucx={{'NET_DEVICES': '{example}'}})"
        found = f"none is named: peers of this host only, without TCP; there are {others}"
        return Check("network", "ucx devices", Verdict.OK, found, advice)
    return Check("network", "ucx devices", Verdict.OK, f"{', '.join(used)}, by UCX_NET_DEVICES")
