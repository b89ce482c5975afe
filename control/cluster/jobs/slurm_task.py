"""The program on each node of a Slurm job, which becomes its agent.

    slurm_task.py ANNOUNCEMENT SECRET_FILE IDLE_S INTERFACE AUTHORITY

It finds the IP of the node, makes a certificate for it if there is an authority, and serves like ``skipper host
serve``.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

if not __package__:  # it runs as a file: on the path, the folder that holds the package replaces its folder
    sys.path[0] = os.path.abspath(os.path.join(__file__, *[os.pardir] * 5))

from skipper.control.cluster.hosts import command
from skipper.control.cluster.jobs.slurm import slurm
from skipper.control.model.errors import JobError
from skipper.control.wire import addresses
from skipper.control.wire.addresses import address_of_device


def main(announcement: str, secret_file: str, idle_s: str, interface: str, authority: str) -> int:
    """Serve until the job ends; returns the exit status."""
    # submitit makes Slurm send this some time before the time limit, to all processes of the job; by default it would
    # kill them. Processes that the agent starts inherit the setting, and may change it.
    signal.signal(getattr(signal, f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"), signal.SIG_IGN)
    host = node_address(interface)
    options = ["--address", f"tcp://{addresses.at(host, 0)}", "--secret-file", secret_file, "--announce", announcement]
    if authority:
        from skipper.control.cluster.hosts.certs import issue

        options += ["--certs", str(issue(authority, f"{announcement}.certs", [host], role="host"))]
    else:
        options += ["--insecure"]
    return command.main(["serve", *options, "--idle-timeout", idle_s])


def node_address(interface: str) -> str:
    """The IP at which others reach this node.

    Args:
        interface: the network device that has it; empty: the address at which Slurm itself reaches the node.

    Raises:
        JobError: there is no such address.
    """
    if interface:
        host = address_of_device(interface)
        if host is None:
            raise JobError(f"this node has no network device {interface!r} with an IPv4 address")
        return host
    host = addresses.parse(f"{_slurms_address()}:0")[0]
    submitter = os.environ.get("SLURM_SUBMIT_HOST", "")
    if addresses.is_loopback(host) and submitter not in ("", socket.gethostname()):
        # As on Debian, where a machine resolves its own name to 127.0.1.1.
        return addresses.own_address_towards(addresses.parse(f"{submitter}:0")[0])
    return host


def _slurms_address() -> str:
    """NodeAddr of slurm.conf; by default the machine's name."""
    node = os.environ.get("SLURMD_NODENAME", "")
    try:
        said = slurm("scontrol", "show", "node", node) if node else ""
    except JobError:  # the image of the jobs need not have Slurm's commands
        said = ""
    values = (word.removeprefix("NodeAddr=") for word in said.split() if word.startswith("NodeAddr="))
    return next(values, "") or socket.gethostname()


if __name__ == "__main__":
    if len(sys.argv) != 6:
        sys.exit("usage: slurm_task.py ANNOUNCEMENT SECRET_FILE IDLE_S INTERFACE AUTHORITY")
    sys.exit(main(*sys.argv[1:]))
