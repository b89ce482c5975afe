"""Limits of threads and processes: checked before gRPC starts, which aborts a process that cannot start a thread."""

from __future__ import annotations

import resource
import threading

from skipper.control.model.errors import ThreadLimitError
from skipper.control.support import cgroup

NEEDED = 13
"""How many threads the runtime of a process has: its own few, and those that gRPC starts with the first link."""
_NO_THREAD = "can't start new thread"


def check() -> None:
    """Check that the threads that the runtime needs can be started, by starting as many for a moment.

    Raises:
        ThreadLimitError: they cannot.
    """
    done = threading.Event()
    probes: list[threading.Thread] = []
    try:
        for _ in range(NEEDED):
            probe = threading.Thread(target=done.wait, name="control-probe", daemon=True)
            start(probe)
            probes.append(probe)
    finally:
        done.set()
        for probe in probes:
            probe.join()


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        ThreadLimitError: a limit of the system does not allow it.
    """
    try:
        thread.start()
    except RuntimeError as error:
        if str(error) != _NO_THREAD:
            raise  # it has been started before, or the interpreter is ending
        raise ThreadLimitError(f"no thread can be started: {limits()}") from error


def limits() -> str:
    """The limits that may be the reason why no thread or process can be started."""
    if is_group_full():
        maximum, count = cgroup.process_limit(), cgroup.process_count()
        reason = (
            f"the control group of this process has {count} processes and threads and may have {maximum} (pids.max), "
            f"and a process of a job needs {NEEDED}"
        )
    elif (of_user := resource.getrlimit(resource.RLIMIT_NPROC)[0]) != resource.RLIM_INFINITY:
        reason = f"a user may have {of_user} processes and threads (RLIMIT_NPROC, ulimit -u), or the system has no more"
    else:
        reason = (
            "the system has no more processes and threads (kernel.threads-max, kernel.pid_max), or no memory for one"
        )
    return f"{reason}. Raise the limit, or spawn fewer processes"


def is_group_full() -> bool:
    """Whether the control group of this process has no room for another runtime."""
    maximum, count = cgroup.process_limit(), cgroup.process_count()
    return maximum is not None and count is not None and count + NEEDED >= maximum
