"""A megabyte from another process, by one backend: the only proof that it works."""

import subprocess
import sys
import threading
import time

import numpy as np

from skipper import dataplane

_NBYTES = 1 << 20
_BYTE = 0x5A
_TIMEOUT_S = 20.0
_TRANSFER_S = 10.0


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
    command = [sys.executable, "-m", "skipper.dataplane.doctor.probes.owner", backend, str(_NBYTES)]
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
        raise TrialError(said.rpartition("\n")[2] or f"the owner said nothing within {_TIMEOUT_S:.0f} s")
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
