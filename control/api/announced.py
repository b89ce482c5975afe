"""How a user's tools find running jobs that are not served: each script announces its job in a private file.

A job that its script serves is found by its name. Every other job also has a connection file, in the same folder and
equally private, under the name of its script and its process id. Tools look there; `join` does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import sys
import threading
from pathlib import Path

from skipper.control.model.errors import JoinError
from skipper.control.runtime import join_file
from skipper.control.runtime.join_file import Beyond, Connection
from skipper.control.runtime.process import Process
from skipper.control.wire.addresses import host_of, within_host

MANY = 32
"""With this many files, some may belong to jobs that were killed: stale ones are removed."""
_MOST_NAME = 40

_log = logging.getLogger("skipper.control")


def connection_of(process: Process, name: str) -> Connection:
    """The connection to the job of this script, under a name."""
    host, state = host_of(process.me.address), process.state
    return Connection(
        name=name,
        root=process.me if host else dataclasses.replace(process.me, address=within_host(process.me.id)),
        secret=process.secret,
        settings=process.settings,
        host=join_file.this_network(),
        hostname=os.uname().nodename,
        beyond=Beyond(host, state.certs, data_plane=state.data_plane_is_open) if host else None,
    )


def script_name() -> str:
    """The name of this script for people: its file without the ending, or ``python`` at a prompt."""
    path = Path(sys.argv[0] if sys.argv and sys.argv[0] != "-c" else "")
    name = path.parent.name if path.name == "__main__.py" else path.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:_MOST_NAME].strip("._-") or "python"


def announce(process: Process) -> None:
    """Let the tools of this user find the job of this script, until it ends.

    If that is not possible, for example in a folder that another user has made, the job runs without it.
    """
    if process.root.id != process.me.id:
        return
    connection = connection_of(process, f"{script_name()}-{os.getpid()}")
    try:
        path = join_file.write(connection, join_file.ANNOUNCED)
        is_crowded = len(os.listdir(path.parent)) > MANY
    except (JoinError, OSError) as error:
        _log.debug("tools cannot find this job by its name: %s", error)
        return
    process.ending.before.append(lambda: join_file.remove(path, connection))
    if is_crowded:
        threading.Thread(target=_sweep, name="control-announced-old", daemon=True).start()


def found(known: set[str]) -> dict[str, Connection]:
    """The announced jobs of this user, by name, except those with the given ids of scripts.

    Raises:
        UnsafeFileError: the folder belongs to somebody else, or others may enter it.
    """
    connections = {}
    for name in join_file.running(join_file.ANNOUNCED):
        with contextlib.suppress(JoinError, OSError):  # it has just ended, or is not a connection file
            connection = join_file.read(join_file.path_of(name, join_file.ANNOUNCED))
            if connection.root.id not in known:
                connections[name] = connection
    return connections


def find(word: str) -> Connection | None:
    """The announced job with a script's name, if it is the only one; with a name and process id; or with a job's id.

    Raises:
        UnsafeFileError: the folder belongs to somebody else, or others may enter it.
    """
    everybody = found(set())
    if word in everybody:
        return everybody[word]
    meant = [
        connection
        for name, connection in everybody.items()
        if word in (name.rpartition("-")[0], name.rpartition("-")[2], connection.root.job)
    ]
    return meant[0] if len(meant) == 1 else None


def _sweep() -> None:
    with contextlib.suppress(JoinError, OSError):
        join_file.running(join_file.ANNOUNCED)
