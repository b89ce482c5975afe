"""``skipper names``: the metadata service as a separate program, and a list of its names."""

from __future__ import annotations

import argparse
import os
import signal
import stat
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from skipper.commandline import (
    DONE,
    FAILED,
    INTERRUPTED,
    LOOPBACK,
    STDOUT,
    BadArgumentsError,
    CommandParser,
    add_certs,
    add_command,
    add_host,
    add_insecure,
    add_json,
    add_port,
    add_secret_file,
    add_timeout,
    run,
    write_json,
)
from skipper.control.api.namespaces import ROOT
from skipper.control.model.errors import ControlError
from skipper.control.rpc.metadata import METADATA_VARIABLE, MetadataResolver, MetadataServer
from skipper.control.rpc.urls import split_address
from skipper.control.rpc.user_secret import SECRET_VARIABLE, read_secret
from skipper.control.support.private_file import check_private
from skipper.control.wire.certificates import Certificates, Tls

_TIMEOUT_S = 5.0
_ONE_OF_TWO = "pass --address HOST:PORT, or --host and --port"


def main(argv: Sequence[str], *, prog: str = "skipper names") -> int:
    """Serve names, or list them.

    Args:
        argv: the arguments, without the program's name.
        prog: what was typed before them; shown in messages.

    Returns:
        The exit code; ``--help`` lists them.
    """
    return run(parser(prog), argv, _do, errors=(ControlError, OSError, ValueError), status=FAILED)


def _do(given: argparse.Namespace) -> int:
    secret = None if given.secret_file is None else read_secret(Path(given.secret_file))
    return _serve(given, secret) if given.command == "serve" else _list(given, secret)


def _serve(given: argparse.Namespace, secret: bytes | None) -> int:
    host, port = _place(given)
    tls = None
    if (given.certificate is None) != (given.key is None):
        raise BadArgumentsError("--certificate goes with --key")
    if given.certificate is not None:
        authority = None if given.authority is None else given.authority.read_bytes()
        tls = Tls(authority, given.certificate.read_bytes(), _private(given.key))
    ended = threading.Event()
    received: list[int] = []

    def end(number: int, _: object) -> None:
        received.append(number)
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    with MetadataServer(host, port, secret=secret, tls=tls, certs=given.certs, insecure=given.insecure) as server:
        sys.stdout.write(f"serving names at {server.address}\n")
        sys.stdout.flush()
        ended.wait()
    return INTERRUPTED if received == [signal.SIGINT] else DONE


def _private(path: Path) -> bytes:
    """A key.

    Raises:
        UnsafeFileError: others could read the file, or could have written it.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        check_private(os.fstat(file.fileno()), path, stat.S_ISREG)
        return file.read()


def _list(given: argparse.Namespace, secret: bytes | None) -> int:
    if given.certs is not None and given.authority is not None:
        raise BadArgumentsError("--certs takes the place of --authority: pass one of them")
    tls = None
    if given.certs is not None:
        tls = Tls(*Certificates(given.certs).pems())
    elif given.authority is not None:
        tls = Tls(given.authority.read_bytes())
    resolver = MetadataResolver(_address(given), namespace=ROOT, secret=secret, tls=tls, timeout=given.timeout)
    names = resolver.names(given.prefix)
    write_json({name: list(urls) for name, urls in names.items()}, given.json)
    for name, urls in names.items() if given.json != STDOUT else ():
        sys.stdout.write(f"{name}  {' '.join(urls)}\n")
    return 0


def _place(given: argparse.Namespace) -> tuple[str, int]:
    """Where to listen."""
    if given.address is None:
        return given.host or LOOPBACK, given.port or 0
    if given.host is not None or given.port is not None:
        raise BadArgumentsError(_ONE_OF_TWO)
    return (given.address[:-2], 0) if given.address.endswith(":0") else split_address(given.address)


def _address(given: argparse.Namespace) -> str | None:
    """The service's ``host:port``, from a flag or the environment; None if it was not given."""
    if given.host is None and given.port is None:
        return None if given.address is None else str(given.address)
    if given.address is not None or given.port is None:
        raise BadArgumentsError(_ONE_OF_TWO)
    host = given.host or LOOPBACK
    return (f"[{host}]" if ":" in host else host) + f":{given.port}"


def parser(prog: str) -> CommandParser:
    """The parser of the command."""
    own = CommandParser(prog=prog, description="Serve or list the names of actors and services.")
    commands = own.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    serve = add_command(commands, "serve", "run the metadata service until SIGTERM or Ctrl-C")
    serve.add_argument(
        "--address", metavar="HOST:PORT", help="address to listen on (default: 127.0.0.1:0); port 0 means any free port"
    )
    serve.add_argument(
        "--certificate", type=Path, metavar="FILE", help="PEM file with the server's certificate, for TLS"
    )
    serve.add_argument("--key", type=Path, metavar="FILE", help="PEM file with the private key of --certificate")
    add_insecure(serve)
    listing = add_command(commands, "list", "print the registered names and their URLs")
    listing.add_argument(
        "prefix", nargs="?", default="/", metavar="PREFIX", help="only names that begin with this (default: /)"
    )
    listing.add_argument(
        "--address",
        metavar="HOST:PORT",
        help=f"address of the metadata service (default: the value of {METADATA_VARIABLE})",
    )
    add_timeout(listing, _TIMEOUT_S, "seconds to wait for the service's answer")
    add_json(listing, "names with their URLs")
    for command, port in ((serve, "the port (default: any free port)"), (listing, "the port")):
        add_host(command, default=None, what=f"instead of --address: the host (default: {LOOPBACK})")
        add_port(command, what=f"instead of --address: {port}")
        add_secret_file(command, f"the file that {SECRET_VARIABLE} names")
        add_certs(command)
        command.add_argument(
            "--authority",
            type=Path,
            metavar="FILE",
            help="PEM file with the certificate authority that signed the other end's certificate",
        )
    return own
