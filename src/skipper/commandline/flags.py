"""The flags that several commands have. Each is defined here once, so that it means the same everywhere."""

from __future__ import annotations

import argparse
from typing import Any, Protocol

from skipper.commandline.json_output import STDOUT
from skipper.commandline.values import output_path, port_number, seconds

LOOPBACK = "127.0.0.1"


class TakesArguments(Protocol):
    """A parser, or a group of its arguments."""

    def add_argument(self, *names: str, **how: Any) -> argparse.Action:
        """As of `argparse.ArgumentParser`."""


def add_json(parser: TakesArguments, what: str = "the report") -> None:
    """``-J``, ``--json [PATH]``: ``given.json`` is a path, `STDOUT`, or None."""
    parser.add_argument(
        "-J",
        "--json",
        nargs="?",
        const=STDOUT,
        type=output_path,
        metavar="PATH",
        help=f"write {what} as JSON to PATH; without PATH, or with -, write only that to standard output",
    )


def add_csv(parser: TakesArguments) -> None:
    """``--csv PATH``: ``given.csv`` is a path or None."""
    parser.add_argument("--csv", type=output_path, metavar="PATH", help="write the rows as CSV")


def add_quick(
    parser: TakesArguments, what: str = "only a few rounds, to check that it works; the figures mean nothing"
) -> None:
    """``--quick``: ``what`` says what it leaves out."""
    parser.add_argument("--quick", action="store_true", help=what)


def add_job(parser: TakesArguments) -> None:
    """``-j``, ``--job JOB``: which running job to use."""
    parser.add_argument(
        "-j",
        "--job",
        metavar="JOB",
        help="the job: its name or id, the name or pid of its script, or the path of its connection file (default: "
        "the value of SKIPPER_JOB, or your only running job)",
    )


def add_timeout(parser: TakesArguments, default_s: float, what: str) -> None:
    """``--timeout S``: how long to wait; ``what`` says for what."""
    parser.add_argument(
        "--timeout", type=seconds, default=default_s, metavar="S", help=f"{what} (default: {default_s:g})"
    )


def add_host(parser: TakesArguments, *aliases: str, default: str | None = LOOPBACK, what: str) -> None:
    """``--host ADDRESS``: where something listens, or is reached."""
    parser.add_argument(*aliases, "--host", dest="host", default=default, metavar="ADDRESS", help=what)


def add_port(parser: TakesArguments, *aliases: str, default: int | None = None, what: str) -> None:
    """``--port PORT``: its TCP port."""
    parser.add_argument(*aliases, "--port", dest="port", type=port_number, default=default, metavar="PORT", help=what)


def add_secret_file(parser: TakesArguments, default: str = "") -> None:
    """``--secret-file FILE``: the secret that both ends have to know; ``default`` names the usual one."""
    ending = f" (default: {default})" if default else ""
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help=f"file with the secret that both ends share; only you may have permission to read it{ending}",
    )


def add_certs(parser: TakesArguments) -> None:
    """``--certs DIR``: TLS with the certificates that ``skipper certs`` makes."""
    parser.add_argument(
        "--certs", metavar="DIR", help="use TLS, with the certificates of this machine from this folder (skipper certs)"
    )


def add_insecure(parser: TakesArguments) -> None:
    """``--insecure``: no TLS to other machines."""
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="use no TLS between machines; only where you trust the whole network",
    )
