"""What runs as the agent of a place on a node of a Ray cluster: ``ray_agent.py FOLDER HOST OPTIONS``.

The folder holds what scripts and agents know each other by, and is removed when this process ends, however it does. The
options are those of ``skipper host serve``.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # run as a file: its folder's place on the path goes to the folder that holds the package
    sys.path[0] = os.path.abspath(os.path.join(__file__, *[os.pardir] * 5))


def main(folder: str, host: str, options: list[str]) -> int:
    """Serve until standard input ends; returns the exit status."""
    _remove_afterwards(folder)  # before anything makes threads, which a fork would lose
    from skipper.control.cluster.hosts import command
    from skipper.control.wire import addresses
    from skipper.control.wire.certificates import AUTHORITY, SECRET

    options = ["--address", f"tcp://{addresses.at(host, 0)}", "--until-eof", *options]
    options += ["--secret-file", os.path.join(folder, SECRET)]
    if os.path.exists(os.path.join(folder, AUTHORITY)):
        from skipper.control.cluster.hosts.certs import issue

        options += ["--certs", str(issue(folder, os.path.join(folder, "certs"), [host], role="host"))]
    return command.main(["serve", *options])


def _remove_afterwards(folder: str) -> None:
    """Have a process wait for the end of this one, and remove the folder then: Ray kills what its actors have started.

    It is no child of the actor, so that Ray does not kill it as well.
    """
    ours, mine = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.close(mine)
        for fd in (0, 1, 2):
            os.close(fd)
        os.read(ours, 1)  # ends with the process that has the other end
        os.execvp("rm", ["rm", "-rf", "--", folder])
    os.close(ours)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
