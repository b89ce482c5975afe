"""``skipper certs``: certificates for TLS between the machines of a job."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from control.command_line import EXIT_CODES, run
from control.errors import CertificateError


def main(argv: Sequence[str], *, prog: str = "skipper certs") -> int:
    """Run one of the commands.

    Args:
        argv: the arguments, without the program's name.
        prog: what was typed before them.

    Returns:
        The exit code; ``--help`` lists them.
    """
    return run(_parser(prog), argv, lambda given: _make(given, prog), errors=(CertificateError,), status=1)


def _make(given: argparse.Namespace, prog: str) -> int:
    try:
        from control.hosts import certs
    except ImportError:
        sys.stderr.write(f"{prog}: this takes cryptography: pip install 'skipper-mesh[hosts]'\n")
        return 1
    if given.command == "init":
        certs.make_authority(given.folder, days=given.days)
    else:
        certs.issue(given.authority, given.folder, given.host)
    return 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Make an authority, and with it a certificate for every machine of a job.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", required=True, dest="command", metavar="COMMAND")
    init = commands.add_parser("init", help="make an authority and a secret for agents, in a new folder")
    init.add_argument("folder", metavar="DIR")
    init.add_argument("--days", type=int, default=365, metavar="N", help="how long it is valid (default: 365)")
    issue = commands.add_parser("issue", help="make the folder of one machine, to be copied there")
    issue.add_argument("authority", metavar="AUTHORITY", help="the folder that init made")
    issue.add_argument("folder", metavar="DIR", help="the folder to make")
    issue.add_argument(
        "--host", action="append", required=True, metavar="IP", help="where the machine is reached; as often as needed"
    )
    return parser
