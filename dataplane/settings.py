"""What users set for the data plane of this process, and ask about it: `dataplane.configure`, `backends` and so on."""

import os
from collections.abc import Mapping
from typing import Any

from skipper.dataplane import config
from skipper.dataplane.backends.base import BackendStatus
from skipper.dataplane.metering import Traffic
from skipper.dataplane.process import current, meter


def configure(
    *,
    backend: str | None = None,
    copy_threads: int | None = None,
    export: str | None = None,
    ucx: Mapping[str, Any] | None = None,
    ucx_library: str | os.PathLike[str] | None = None,
    verbs: Mapping[str, Any] | None = None,
    secret: bytes | None = None,
) -> None:
    """Change how this process moves data. What is None stays as it is.

    Applies to operations submitted and handles exported from then on; an `RDMAAction` is compiled again.
    The UCX and verbs arguments must come before the first use of their backends.

    Args:
        backend: "auto" (default): the first of shm, cuda_ipc, ucx, verbs that works. A name: only that one between
            processes.
        copy_threads: Threads that copy large blocks; at most 4 by default, and no more than CPUs.
        export: "nearest": a handle carries what the best backend needs; for memory from `empty` no UCX is started, and
            that of a GPU is handed out for cuda_ipc and, where a process sees other GPUs, for the next best. "all": a
            handle carries every backend that is allowed and usable. By default "nearest" until other hosts are
            attached, and "all" from then on.
        ucx: Options of UCX by name without the prefix, e.g. {"NET_DEVICES": "mlx5_0:1"}; replaces an earlier mapping.
            Without NET_DEVICES (here or in the environment) nothing is reachable from beyond this host.
        ucx_library: Path of the libucp.so.0 to use in place of the one from the wheel.
        verbs: What the verbs backend uses instead of its own choice; replaces an earlier mapping. device (one name, a
            list of "NAME" or "NAME:PORT" to spread large transfers over, or "all" active ports), port, gid_index, mtu
            (bytes), timeout and retry_cnt (as in ibv_modify_qp; 14 and 6: a dead link is an error after
            half a second), depth (work requests per queue pair), listen ("HOST:PORT"): where peers of other hosts
            connect (without it only this host can), and rdma_cm (True: peers' queue pairs are connected by the RDMA
            connection manager).
        secret: 16 bytes or more, the same on both sides. It and the job's secret prove the handles of this process,
            and by them this process recognises those of others. By default that of the user (a file of mode 0600 below
            ``$XDG_RUNTIME_DIR`` or the folder for temporary files, or the one that ``SKIPPER_SECRET_FILE`` names). It
            holds for handles that are made or opened from then on.

    Raises:
        ConfigurationError: A value does not exist, or comes too late.
    """
    process = current()
    process.configure(
        config.checked(
            process.config,
            backend=backend,
            copy_threads=copy_threads,
            export=export,
            ucx=ucx,
            ucx_library=ucx_library,
            verbs=verbs,
            secret=secret,
        )
    )


def backends() -> list[BackendStatus]:
    """Every backend with whether it is usable here, and why not. Starts nothing."""
    process = current()
    return [process.local.status(), *(backend.status() for backend in process.transports.values())]


def traffic() -> Traffic:
    """How much this process has moved so far, and is moving. Starts nothing."""
    known = meter()
    return Traffic(0, 0, 0, 0, 0) if known is None else known.read()


def get_rdma_backend() -> str:
    """The backend that moves ordinary memory between processes here: "ucx", "verbs", or "none"."""
    process = current()
    for name in process.config.order:
        backend = process.transports[name]
        if name not in ("shm", "cuda_ipc") and backend.status().usable:
            return name
    return "none"


def is_ibverbs_available() -> bool:
    """Whether the kernel has an RDMA device: for the verbs backend, or for a UCX with IB support."""
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except FileNotFoundError:
        return False
