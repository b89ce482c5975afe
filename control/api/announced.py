"""Jobs that their user's tools find without having been told of them: each script says privately that it is there.

A job that its script serves is found by its name. Every other one leaves a connection file, too, beside those and just
as private, under the name of its script and its process id. Tools look there; `join` does not.
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
"""With so many files some may be those of jobs that were killed: they are looked through."""
_MOST_NAME = 40

_log = logging.getLogger("skipper.control")


def connection_of(process: Process, name: str) -> Connection:
    """How others reach the job of this script, under a name."""
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
    """Have the tools of this user find the job of this script, until it ends.

    Where that is not possible, as in a folder that others have made, the job goes on without.
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
    """The jobs of this user that are announced, by name, but for those whose scripts' ids are known.

    Raises:
        UnsafeFileError: the folder belongs to somebody else, or others may enter it.
    """
    connections = {}
    for name in join_file.running(join_file.ANNOUNCED):
        with contextlib.suppress(JoinError, OSError):  # it has just ended, or is none
            connection = join_file.read(join_file.path_of(name, join_file.ANNOUNCED))
            if connection.root.id not in known:
                connections[name] = connection
    return connections


def find(word: str) -> Connection | None:
    """The announced job of a script's name, if it is the only one; of a name with process id; or of a job's id.

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
