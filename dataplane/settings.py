"""Settings and status of the data plane of this process: `dataplane.configure`, `backends` and so on."""

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
    """Change how this process moves data. Settings that are None stay as they are.

    The change applies to operations that are submitted and handles that are exported from then on; an `RDMAAction` is
    compiled again. Set the UCX and verbs arguments before the first use of their backends.

    Args:
        backend: "auto" (default): the first of shm, cuda_ipc, ucx, verbs that works. A name: only that one between
            processes.
        copy_threads: Threads that copy large blocks; by default 4, or the number of CPUs if that is smaller.
        export: "nearest": a handle has what the best backend needs; for memory from `empty` no UCX is started, and
            memory of a GPU is exported for cuda_ipc and, for processes that see other GPUs, for the next best backend.
            "all": a handle has every backend that is allowed and usable. The default is "nearest" until other hosts are
            attached, and "all" from then on.
        ucx: Options of UCX by name without the prefix, e.g. {"NET_DEVICES": "mlx5_0:1"}; replaces an earlier mapping.
            Without NET_DEVICES (here or in the environment) other hosts cannot reach this process.
        ucx_library: Path of the libucp.so.0 to use in place of the one from the wheel.
        verbs: Options of the verbs backend instead of its own choice; replaces an earlier mapping. device (one name, a
            list of "NAME" or "NAME:PORT" to spread large transfers over, or "all" active ports), port, gid_index, mtu
            (bytes), timeout and retry_cnt (as in ibv_modify_qp; 14 and 6: a dead link is an error after
            half a second), depth (work requests per queue pair), listen ("HOST:PORT"): where peers of other hosts
            connect (without it only this host can), and rdma_cm (True: peers' queue pairs are connected by the RDMA
            connection manager).
        secret: 16 bytes or more, the same on both sides. This process signs its handles with it and with the job's
            secret, and verifies handles of others by them. The default is the secret of the user (a file of mode 0600
            below ``$XDG_RUNTIME_DIR`` or the folder for temporary files, or the file that ``SKIPPER_SECRET_FILE``
            names). It applies to handles that are made or opened from then on.

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
    """Every backend, with whether it is usable here, and the reason if not. Starts nothing."""
    process = current()
    return [process.local.status(), *(backend.status() for backend in process.transports.values())]


def traffic() -> Traffic:
    """How much this process has transferred so far, and what is in flight. Starts nothing."""
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
