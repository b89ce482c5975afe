"""The console script ``skipper``: one word says which tool, the tool reads the rest.

A tool is a module with ``main(argv, *, prog) -> int`` and ``parser(prog)``, a `CommandParser`. It is imported only when
it is called, so that one tool's libraries never slow another down. To add one, add a line to `GROUPS`, and run
``make cli`` for the page and the completion scripts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

__all__ = ["GROUPS", "TOOLS", "Tool", "main"]


class Tool(NamedTuple):
    """One sub-command: the module that holds its ``main``, and a line for the usage text."""

    module: str
    summary: str


GROUPS: dict[str, dict[str, Tool]] = {
    "measure": {
        "bw": Tool("skipper.benchmarks.bandwidth.command", "bandwidth and latency of one-sided reads and writes"),
        "bw compare": Tool("skipper.benchmarks.bandwidth.compare", "compare two reports: which one is faster"),
        "actors": Tool(
            "skipper.benchmarks.actors.command", "latency and throughput of actor calls, compared with raw gRPC"
        ),
        "dispatch": Tool(
            "skipper.benchmarks.dispatch.command", "time to issue, run and fetch operations of the tensor engine"
        ),
        "scale": Tool("skipper.benchmarks.scale.command", "calls to many processes, directly and through a tree"),
        "weight-sync": Tool(
            "skipper.benchmarks.weight_sync.command", "time to send weights from trainers to generators"
        ),
    },
    "run a job": {
        "run": Tool("skipper.control.observe.run_command", "run a script as python does, and keep a record of it"),
        "record": Tool("skipper.control.observe.record_command", "show records of runs, running or ended"),
    },
    "run a job on several machines": {
        "host": Tool(
            "skipper.control.cluster.hosts.command", "run the agent of this machine, for scripts on other machines"
        ),
        "certs": Tool("skipper.control.cluster.hosts.certs_command", "make certificates for TLS between machines"),
        "names": Tool("skipper.control.rpc.command", "serve or list names of actors and services"),
    },
    "look into a running job": {
        "status": Tool(
            "skipper.control.observe.status_command", "its hosts, processes and actors, and what they are doing"
        ),
        "stacks": Tool("skipper.control.observe.stacks_command", "where every thread is, also in processes that hang"),
        "logs": Tool("skipper.control.observe.logs_command", "the output of its processes, also after it has ended"),
        "debug": Tool("skipper.control.observe.debug_command", "pdb for actors that have stopped at a breakpoint()"),
        "dashboard": Tool("skipper.control.observe.dashboard", "status, output, stacks and errors in a browser"),
        "weights": Tool("skipper.torchstore.proofs.command", "check weights against a certificate"),
        "metrics": Tool("skipper.control.observe.metrics", "serve its metrics and its health to Prometheus"),
    },
    "this machine": {
        "doctor": Tool("skipper.dataplane.doctor.command", "what the data plane can use here, and what is missing"),
        "completion": Tool("skipper.cli.completion", "print the completion script for bash, zsh or fish"),
    },
}
"""The tools by what they are for, in the order in which they are shown."""

TOOLS: dict[str, Tool] = {word: tool for tools in GROUPS.values() for word, tool in tools.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``skipper``.

    Args:
        argv: Arguments after the program's name; ``None`` takes the process' own.

    Returns:
        The exit code: that of the tool, 0 for help, 2 for an unknown tool or none, 130 for Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # while a tool was being imported, or was cleaning up
        return 130


def _run(arguments: list[str]) -> int:
    if not arguments:
        print(_usage(), file=sys.stderr)
        return 2
    word, *rest = arguments
    if word == "help" and rest:
        word, *rest = [*rest, "--help"]
    if word in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if word in ("-V", "--version"):
        print(f"skipper {_version()}")
        return 0
    if rest and f"{word} {rest[0]}" in TOOLS:
        word = f"{word} {rest.pop(0)}"
    tool = TOOLS.get(word)
    if tool is None:
        from skipper.commandline import did_you_mean

        guess = did_you_mean(word, [*TOOLS, "help", "--help", "--version"])
        more = "; see skipper --help" if guess else f"\n\n{_usage()}"
        print(f"skipper: there is no tool {word!r}{guess}{more}", file=sys.stderr)
        return 2
    exit_code: int = import_module(tool.module).main(rest, prog=f"skipper {word}")
    return exit_code


def _usage() -> str:
    width = max(map(len, TOOLS))
    parts = ["usage: skipper TOOL [OPTIONS]"]
    for group, tools in GROUPS.items():
        lines = (f"  {word:<{width}}  {tool.summary}" for word, tool in tools.items())
        parts.append("\n".join([f"{group}:", *lines]))
    parts.append("`skipper TOOL --help` or `skipper help TOOL` prints its options, `skipper --version` the version.")
    return "\n\n".join(parts)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("skipper-mesh")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
