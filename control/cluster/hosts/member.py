"""The main program of a job's process on a host: ``member.py CONFIG_FD REPORT_FD PARENT_PID``.

It is a process of the job like any other, but its parent is the agent and it has no actors: the script, and other
processes of the job, ask it to launch processes. It ends with the script, however that ends, and with the agent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skipper.control.model.settings import Settings
    from skipper.control.wire.process_ref import ProcessRef


def main() -> None:
    """Read the config, join the job, report the address to the agent, stay until the script or the agent is gone."""
    from skipper.control.runtime.procs.guard import die_with

    config_pipe, report, parent_pid = map(int, sys.argv[1:4])
    die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the agent, which then ends this process
    os.set_inheritable(config_pipe, False)
    os.set_inheritable(report, False)
    with open(config_pipe, "rb", closefd=False) as pipe:
        line = pipe.readline()
    if not line.endswith(b"\n"):
        raise EOFError("the agent has ended")
    config: dict[str, Any] = json.loads(line)
    sys.path += [entry for entry in config["sys_path"] if entry not in sys.path]
    os.write(report, f"{_join(config)}\n".encode())
    os.close(report)
    while os.read(config_pipe, 1):
        pass
    os._exit(0)


def part_in_job(config: Mapping[str, Any]) -> tuple[ProcessRef, ProcessRef, Settings]:
    """The job's process on this host, the script, and the bounds of the job, from the agent's data."""
    from skipper.control.model.settings import Settings
    from skipper.control.wire.addresses import at
    from skipper.control.wire.process_ref import ProcessRef

    root = ProcessRef(config["root"]["id"], config["root"]["address"], config["root"]["name"])
    me = ProcessRef(config["me"]["id"], at(config["me"]["host"], 0), config["me"]["name"], root)
    plain = config["settings"]
    settings = Settings(**plain | {"preload": plain["preload"] and tuple(plain["preload"])})  # JSON has no tuples
    return me, root, settings


def _join(config: dict[str, Any]) -> str:
    """Become a process of the job; returns the address where it listens."""
    from skipper.control.runtime import current_runtime
    from skipper.control.runtime.data_plane_access import open_data_plane

    me, root, settings = part_in_job(config)
    secret, is_open = bytes.fromhex(config["secret"]), bool(config["open_data_plane"])
    if is_open:
        open_data_plane(config["me"]["host"])
    process = current_runtime.start_host(me, root, secret, settings, config["certs"], data_plane_is_open=is_open)
    # At once: what it has launched dies with it, and nobody is left to wait for anything else.
    process.remote_launch.stand_for_job(lambda reason: os._exit(0))
    return process.me.address


if __name__ == "__main__":
    # As in `worker`: on the path, the folder that holds the package replaces its folder.
    sys.path[0] = os.path.abspath(os.path.join(__file__, *[os.pardir] * 5))
    from skipper.control.cluster.hosts import member

    member.main()
