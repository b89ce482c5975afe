"""RDMA devices and GPUs: which there are, and what keeps the data plane from using them."""

import importlib.util
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skipper.dataplane.doctor.checks import Check, Verdict
from skipper.dataplane.doctor.probes import ProbeError, ask
from skipper.dataplane.doctor.sysfs import RdmaPort, mellanox_adapters, rdma_ports

_REGISTERED = 64 << 20
_DEBIAN = Path("/usr/lib/python3/dist-packages/pyverbs")

_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")

Facts = dict[str, Any]


def rdma() -> tuple[list[Check], Facts]:
    """Examine the devices, and, if there are any, what is needed to use them."""
    ports = rdma_ports()
    if not ports:
        return [_no_device()], {"ports": [], "pyverbs": _pyverbs_facts()}
    asked = _ask_devices(ports)
    checks = [port_check(port, asked.get(f"{port.device}:{port.number}", {})) for port in ports]
    active = any(port.state == "ACTIVE" for port in ports)
    pyverbs = _pyverbs_facts(trial=True)
    checks += [_access(), pyverbs_check(pyverbs, needed=active)]
    facts = [{**asdict(port), **asked.get(f"{port.device}:{port.number}", {})} for port in ports]
    return checks, {"ports": facts, "pyverbs": pyverbs}


def _no_device() -> Check:
    adapters = mellanox_adapters()
    if adapters:
        found = f"{adapters} NVIDIA/Mellanox adapter(s) on the PCI bus, and no RDMA device for them"
        advice = "modprobe mlx5_ib (Debian: apt-get install rdma-core); in a container: --device /dev/infiniband"
        return Check("rdma", "devices", Verdict.PROBLEM, found, advice)
    return Check("rdma", "devices", Verdict.ABSENT, "this kernel has no RDMA device (/sys/class/infiniband)")


def _ask_devices(ports: Sequence[RdmaPort]) -> dict[str, Facts]:
    names = [f"{port.device}:{port.number}" for port in ports]
    try:
        answer: dict[str, Facts] = ask("ports", str(_REGISTERED), *names)
    except ProbeError as error:
        return {name: {"error": str(error)} for name in names}
    return answer


def port_check(port: RdmaPort, asked: Facts) -> Check:
    """Whether a port can be used."""
    name = f"{port.device} port {port.number}"
    rate = "rate not stated" if port.gbit_per_s is None else f"{port.gbit_per_s:g} Gb/s"
    nominal = " (nominal: a device made of software)" if port.software else ""
    mtu = f", MTU {asked['active_mtu']}" if asked.get("active_mtu") else ""
    addresses = ", ".join(f"{gid.index}: {gid.gid}" for gid in port.gids[:4])
    more = f" and {len(port.gids) - 4} more" if len(port.gids) > 4 else ""
    found = f"{port.state}, {port.link}, {rate}{nominal}{mtu}; GIDs {addresses or 'none'}{more}"
    if port.state != "ACTIVE":
        advice = (
            "ip link set its interface up" if port.link == "Ethernet" else "look at the cable and the subnet manager"
        )
        return Check("rdma", name, Verdict.WARNING, found, advice)
    if "error" in asked:
        advice = "apt-get install ibverbs-providers libibverbs1; in a container: --device /dev/infiniband"
        return Check("rdma", name, Verdict.PROBLEM, f"{found}; {asked['error']}", advice)
    if asked.get("register"):
        found += f"; {_REGISTERED >> 20} MiB of memory cannot be registered: {asked['register']}"
        return Check("rdma", name, Verdict.PROBLEM, found, "raise the limit of locked memory (ulimit -l unlimited)")
    if not port.gids:
        return Check("rdma", name, Verdict.WARNING, found, "give its interface an address")
    return Check("rdma", name, Verdict.OK, found)


def _access() -> Check:
    """Whether this user may open the devices."""
    nodes = sorted(Path("/dev/infiniband").glob("uverbs*"))
    if not nodes:
        found, advice = "/dev/infiniband has no uverbs device", "modprobe ib_uverbs; docker: --device /dev/infiniband"
        return Check("rdma", "device files", Verdict.PROBLEM, found, advice)
    closed = [node.name for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if closed:
        found = f"this user may not open {', '.join(closed)}"
        return Check("rdma", "device files", Verdict.PROBLEM, found, "chmod 666 /dev/infiniband/uverbs* (udev does it)")
    return Check("rdma", "device files", Verdict.OK, f"{len(nodes)} in /dev/infiniband, open to this user")


def _pyverbs_facts(*, trial: bool = False) -> Facts:
    """Where pyverbs is, which rdma-core the libraries are of, and why it cannot be imported if so."""
    spec = importlib.util.find_spec("pyverbs")
    elsewhere = sorted(_DEBIAN.glob("device.*.so"))
    facts: Facts = {
        "found": spec is not None,
        "rdma_core": _rdma_core(),
        "debian_module": elsewhere[0].name if elsewhere else None,
        "error": None,
    }
    if spec is not None and trial:
        try:
            facts["error"] = ask("imports", "pyverbs.device").get("error")
        except ProbeError as error:
            facts["error"] = str(error)
    return facts


def _rdma_core() -> str | None:
    """The version of rdma-core, which ends the file name of libibverbs: libibverbs.so.1.14.44.0 is of 44.0."""
    of_this_processor = f"{platform.machine()}-linux-gnu"
    for folder in (f"/usr/lib/{of_this_processor}", f"/lib/{of_this_processor}", "/usr/lib64", "/usr/lib"):
        library = Path(folder) / "libibverbs.so.1"
        if library.exists():
            version = re.fullmatch(r"libibverbs\.so\.1\.\d+\.(.+)", library.resolve().name)
            return version[1] if version else None
    return None


def pyverbs_check(pyverbs: Facts, *, needed: bool) -> Check:
    """Whether pyverbs can be imported; it is `needed` if a port is active."""
    core = f" (rdma-core {pyverbs['rdma_core']})" if pyverbs["rdma_core"] else ""
    if pyverbs["found"] and pyverbs["error"] is None:
        return Check("rdma", "pyverbs", Verdict.OK, f"can be imported{core}")
    verdict = Verdict.PROBLEM if needed else Verdict.WARNING
    if pyverbs["found"]:
        advice = "install the pyverbs of the same rdma-core as libibverbs, for this version of Python"
        return Check("rdma", "pyverbs", verdict, f"cannot be imported: {pyverbs['error']}{core}", advice)
    if pyverbs["debian_module"]:
        found = f"is installed for Debian's Python ({pyverbs['debian_module']}), where this one does not look"
        advice = f"put a link to {_DEBIAN} into this Python's site-packages; it must be a Python of the same version"
        return Check("rdma", "pyverbs", verdict, found, advice)
    advice = "apt-get install python3-pyverbs ibverbs-providers, and link it into this Python's site-packages"
    return Check("rdma", "pyverbs", verdict, f"is not installed{core}", advice)


def gpu(*, rdma: bool) -> tuple[list[Check], Facts]:
    """Look at the GPUs.

    Args:
        rdma: There is an RDMA device, so that it matters whether it reaches their memory.
    """
    peermem = next((name for name in _PEER_MODULES if Path("/sys/module", name).exists()), None)
    try:
        answer: Facts = ask("gpus")
    except ProbeError as error:
        answer = {"error": str(error), "missing": False}
    facts = {"gpus": answer.get("gpus", []), "cuda": answer.get("cuda"), "error": answer.get("error")}
    facts["peermem"] = peermem
    module = Path("/proc/driver/nvidia/version").exists() or any(Path("/dev").glob("nvidia[0-9]*"))
    return gpu_checks(answer, peermem, rdma=rdma, module=module), facts


def gpu_checks(answer: Facts, peermem: str | None, *, rdma: bool, module: bool) -> list[Check]:
    """The checks for what the probe of the GPUs has answered."""
    if "error" in answer:
        return [_no_driver(answer, module=module)]
    gpus = answer["gpus"]
    if not gpus:
        return [Check("gpu", "devices", Verdict.ABSENT, f"the driver (CUDA {answer['cuda']}) sees none")]
    names = ", ".join(f"{item['name']} ({item['memory_nbytes'] / 2**30:.0f} GiB)" for item in gpus)
    checks = [Check("gpu", "devices", Verdict.OK, f"{names}; driver for CUDA {answer['cuda']}")]
    without = [str(item["index"]) for item in gpus if not item["dmabuf"]]
    if not without:
        found = "all export their memory as dmabuf"
    else:
        found = f"GPU {', '.join(without)} cannot export memory as dmabuf"
    found += f"; kernel module {peermem} is loaded" if peermem else "; nvidia-peermem is not loaded"
    if without and peermem is None and rdma:
        advice = "modprobe nvidia-peermem, or the open kernel modules of a driver from 515 on (dmabuf)"
        return [*checks, Check("gpu", "RDMA to its memory", Verdict.WARNING, found, advice)]
    return [*checks, Check("gpu", "RDMA to its memory", Verdict.OK if rdma else Verdict.ABSENT, found)]


def _no_driver(answer: Facts, *, module: bool) -> Check:
    if not module:
        return Check("gpu", "devices", Verdict.ABSENT, "no NVIDIA driver here")
    advice = "install the driver's user libraries (libcuda.so.1); a container needs --gpus all"
    if not answer["missing"]:
        advice = "nvidia-smi says more; kernel module and libcuda.so.1 must be of one version"
    return Check("gpu", "devices", Verdict.PROBLEM, f"the driver does not answer: {answer['error']}", advice)
