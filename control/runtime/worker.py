"""The main program of a child process: ``worker.py PIPE_FD PARENT_PID NAME``."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from control.runtime.binding import Binding

PR_SET_PDEATHSIG = 1  # linux/prctl.h
EXIT_BOOTSTRAP = 97
"""Exit status of a child whose bootstrap callable raised."""
EXIT_BINDING = 98
"""Exit status of a child that the kernel did not let be bound as asked for."""


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that launched it ends, and end now if that has happened."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)


def main() -> None:
    """Read the config, join the job, and stay until the parent is gone or says so."""
    pipe, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the script, which then ends its children
    os.set_inheritable(pipe, False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    from control.runtime.launcher import read_config

    config = read_config(pipe)
    bind(config.binding)
    sys.path[:] = config.sys_path
    sys.argv[:] = [config.me.name]
    if config.bootstrap:
        run_bootstrap(config.bootstrap)

    from control.runtime import job

    job.join_job(config)
    while os.read(pipe, 1):
        pass
    os._exit(1)


def bind(binding: Binding) -> None:
    """Bind this process before it starts any thread."""
    try:
        binding.apply()
    except OSError as error:
        sys.stderr.write(f"{sys.argv[3]}: {error}\n")
        sys.stderr.flush()
        os._exit(EXIT_BINDING)


def run_bootstrap(packed: tuple[bytes, ...]) -> None:
    """Run the callable that `spawn_procs` was given."""
    import traceback

    from control.wire.payload import unpack

    try:
        unpack(packed)()
    except BaseException:  # noqa: BLE001  (reported with its traceback, and the end of this process)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(EXIT_BOOTSTRAP)


if __name__ == "__main__":
    # Run as a file, so that it starts without knowing where to import from: its folder's place on the path goes to
    # the folder that holds the package.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from control.runtime import worker

    worker.main()
