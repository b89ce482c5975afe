"""The console script ``skipper``: one word says which tool, the tool reads the rest.

A tool is a module with ``main(argv, *, prog) -> int``, imported only when it is asked for, so that one
tool's libraries never slow another down. To add one, add a line to `TOOLS`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

__all__ = ["TOOLS", "Tool", "main"]


@dataclass(frozen=True, slots=True)
class Tool:
    """One sub-command: the module that holds its ``main``, and a line for the usage text."""

    module: str
    summary: str


TOOLS: dict[str, Tool] = {
    "bw": Tool("skipper.benchmarks.bandwidth.command", "bandwidth and latency of one-sided reads and writes"),
    "doctor": Tool(
        "skipper.dataplane.doctor.command", "what the data plane can use on this machine, and what it lacks"
    ),
    "host": Tool("skipper.control.cluster.hosts.command", "the agent of this machine, for scripts on others"),
    "certs": Tool("skipper.control.cluster.hosts.certs_command", "certificates for TLS between the machines of a job"),
    "actors": Tool("skipper.benchmarks.actors.command", "latency and throughput of actor calls beside raw gRPC"),
    "names": Tool("skipper.control.rpc.command", "names of actors and services: serve them, list them"),
    "dispatch": Tool("skipper.benchmarks.dispatch.command", "operations of the tensor engine: issued, run, fetched"),
    "scale": Tool(
        "skipper.benchmarks.scale.command", "casts to many processes, straight and by tree, and a model beyond"
    ),
    "dashboard": Tool("skipper.control.observe.dashboard", "a running job in a browser"),
    "debug": Tool(
        "skipper.control.observe.debug_command", "pdb for the actors of a running job that are at a breakpoint()"
    ),
    "logs": Tool(
        "skipper.control.observe.logs_command", "what the processes of a job have written, also of one that has ended"
    ),
    "metrics": Tool("skipper.control.observe.metrics", "the figures of a running job for Prometheus, and its health"),
    "stacks": Tool(
        "skipper.control.observe.stacks_command", "where every thread of a running job is, also of hung processes"
    ),
    "status": Tool("skipper.control.observe.status_command", "what a running job consists of, and what it is doing"),
    "weight-sync": Tool(
        "skipper.benchmarks.weight_sync.command", "weights from trainers to generators, beside a memcpy"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``skipper``.

    Args:
        argv: Arguments after the program's name; ``None`` takes the process' own.

    Returns:
        The exit code: that of the tool, 0 for help, 2 for an unknown tool or none.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(_usage(), file=sys.stderr)
        return 2
    word, rest = arguments[0], arguments[1:]
    if word in ("-h", "--help"):
        print(_usage())
        return 0
    if word in ("-V", "--version"):
        print(f"skipper {_version()}")
        return 0
    tool = TOOLS.get(word)
    if tool is None:
        print(f"skipper: there is no tool {word!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    exit_code: int = importlib.import_module(tool.module).main(rest, prog=f"skipper {word}")
    return exit_code


def _usage() -> str:
    width = max(map(len, TOOLS))
    tools = "\n".join(f"  {word:<{width}}  {tool.summary}" for word, tool in TOOLS.items())
    return f"usage: skipper TOOL [OPTIONS]\n\ntools:\n{tools}\n\n`skipper TOOL --help` tells more."


def _version() -> str:
    try:
        return version("skipper-mesh")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
