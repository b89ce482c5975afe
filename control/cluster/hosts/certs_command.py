"""``skipper certs``: certificates for TLS between the machines of a cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from skipper.commandline import FAILED, CommandParser, add_command, run, whole
from skipper.control.model.errors import CertificateError
from skipper.control.wire.identity import Role


def main(argv: Sequence[str], *, prog: str = "skipper certs") -> int:
    """Run one of the commands.

    Args:
        argv: the arguments, without the program's name.
        prog: what was typed before them.

    Returns:
        The exit code; ``--help`` lists them.
    """
    return run(parser(prog), argv, lambda given: _make(given, prog), errors=(CertificateError,), status=FAILED)


def _make(given: argparse.Namespace, prog: str) -> int:
    try:
        from skipper.control.cluster.hosts import certs
    except ImportError:
        sys.stderr.write(f"{prog}: this needs the package cryptography: pip install 'skipper-mesh[hosts]'\n")
        return 1
    match given.command:
        case "init":
            certs.make_authority(given.folder, days=given.days, cluster=given.cluster)
        case "issue":
            certs.issue(given.authority, given.folder, given.host, role=given.role, name=given.name, days=given.days)
        case "delegate":
            certs.delegate(given.authority, given.folder, role=given.role)
        case "renew":
            for folder in given.folder:
                certs.renew(given.authority, folder, days=given.days)
        case "revoke":
            for who in certs.revoke(given.authority, given.who):
                sys.stdout.write(f"revoked: {who}\n")
            certs.update(given.authority, given.update)
        case "rotate":
            if given.finish:
                certs.finish_rotation(given.authority)
            else:
                certs.rotate(given.authority, days=given.days)
            certs.update(given.authority, given.update)
        case "update":
            certs.update(given.authority, given.folder)
    return 0


def parser(prog: str) -> CommandParser:
    """The parser of the command."""
    own = CommandParser(
        prog=prog,
        description="Make a certificate authority, and use it to make a certificate for each machine of a cluster.",
    )
    commands = own.add_subparsers(title="commands", required=True, dest="command", metavar="COMMAND")

    init = add_command(commands, "init", "make a certificate authority and a secret for agents, in a new folder")
    init.add_argument("folder", metavar="DIR", help="the folder to make")
    init.add_argument("--days", type=whole(1), default=365, metavar="N", help="days that it is valid (default: 365)")
    init.add_argument(
        "--cluster", metavar="NAME", help="name of the cluster whose certificates it signs (default: a new name)"
    )

    issue = add_command(commands, "issue", "make a folder with the certificate of one machine, to copy to it")
    issue.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="IP",
        help="IP address of the machine; repeat the flag for several",
    )
    issue.add_argument(
        "--name", metavar="NAME", help="name of the certificate, to revoke it by (default: the first --host)"
    )

    delegate = add_command(commands, "delegate", "make an intermediate authority that signs for one role only")
    for command in (issue, delegate):
        command.add_argument("authority", metavar="AUTHORITY", help="the folder that init made")
        command.add_argument("folder", metavar="DIR", help="the folder to make")
        command.add_argument(
            "--role", required=True, choices=list(Role), help="what its holder may do (see the reference of hosts)"
        )

    renew = add_command(commands, "renew", "replace key and certificate in folders that issue made")
    for command in (issue, renew):
        command.add_argument(
            "--days", type=whole(1), metavar="N", help="days that it is valid (default: as long as its authority)"
        )

    revoke = add_command(commands, "revoke", "revoke certificates")
    rotate = add_command(commands, "rotate", "replace the authority; both are trusted until --finish")
    update = add_command(
        commands, "update", "copy the trusted authorities and the revocations to folders that issue made"
    )
    for command in (renew, revoke, rotate, update):
        command.add_argument("authority", metavar="AUTHORITY", help="the folder that init made")
    for command in (renew, update):
        command.add_argument("folder", nargs="+", metavar="DIR", help="the folder of a machine")
    revoke.add_argument(
        "who", nargs="+", metavar="NAME", help="NAME, ROLE/NAME, a certificate file, or a folder with one"
    )
    rotate.add_argument("--finish", action="store_true", help="stop trusting the old authority")
    rotate.add_argument(
        "--days", type=whole(1), default=365, metavar="N", help="days that the new one is valid (default: 365)"
    )
    for command in (revoke, rotate):
        command.add_argument(
            "--update", nargs="+", default=[], metavar="DIR", help="folders to update, as the command update does"
        )
    return own
