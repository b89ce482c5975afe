"""`visiting`: a tool enters a running job to look at it, without becoming one of its members."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from skipper.control.api import join
from skipper.control.runtime import current_runtime
from skipper.control.runtime.process import Process
from skipper.control.runtime.requests import PING


@contextlib.contextmanager
def visiting(address: str | os.PathLike[str] | None = None, *, timeout: float = 10.0) -> Iterator[Process]:
    """This process as one of a running job, for as long as the context lasts.

    A process that belongs to the job already stays what it is. Nobody counts a visitor: it is not among
    `ServedJob.members`, and nothing is spawned on it.

    Args:
        address: as `join` takes it; None: the job that this process belongs to, or else what `join` would take.
        timeout: in seconds.

    Raises:
        JoinError: as `join` says.
        AuthenticationError: the job does not accept the secret.
        DeadlineError: (a `TimeoutError`) the job did not answer in time.
    """
    if address is None and current_runtime.is_running():
        yield current_runtime.current()
        return
    connection = join.find(address)
    if current_runtime.is_running() and current_runtime.current().root.id == connection.root.id:
        yield current_runtime.current()
        return
    process = join.enter(
        connection,
        f"visitor {join.own_name()}",
        lambda process: process.request(connection.root, PING),
        timeout=timeout,
    )
    try:
        yield process
    finally:
        current_runtime.shutdown(grace_s=0)
