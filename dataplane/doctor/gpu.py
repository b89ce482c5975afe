"""GPUs through the driver's own library, and whether network cards could reach their memory."""

from pathlib import Path
from typing import Any

from skipper.dataplane.doctor.checks import Check, Verdict
from skipper.dataplane.doctor.child import ProbeError, ask

_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")

Facts = dict[str, Any]


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
    return checks_of(answer, peermem, rdma=rdma, module=module), facts


def checks_of(answer: Facts, peermem: str | None, *, rdma: bool, module: bool) -> list[Check]:
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
