"""How a child process is executed (see `control.runtime.procs.worker`), and what its exit statuses say."""

from __future__ import annotations

import os
import sys

FORK_SERVER = "fork-server"
EXIT_BOOTSTRAP = 97
"""Exit status of a child whose bootstrap callable raised."""
EXIT_BINDING = 98
"""Exit status of a child that the kernel did not let be bound as asked for."""
EXIT_THREADS = 99
"""Exit status of a child that could not start the threads that it needs."""

_WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")


def command(pipe: int, parent: int | str, name: str) -> list[str]:
    """What to execute for a child that reads its config from ``pipe``."""
    return [sys.executable, _WORKER, str(pipe), str(parent), name]


def command_of_fork_server(connection: int, parent: int | str) -> list[str]:
    """What to execute for a fork server that is asked over the socket ``connection``."""
    return [sys.executable, _WORKER, FORK_SERVER, str(connection), str(parent)]
