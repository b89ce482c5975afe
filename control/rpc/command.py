"""``skipper names``: the metadata service as a program of its own, and a look into it."""

from __future__ import annotations

import argparse
import os
import signal
import stat
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from skipper.control.api.namespaces import ROOT
from skipper.control.model.errors import ControlError
from skipper.control.rpc.metadata import METADATA_VARIABLE, MetadataResolver, MetadataServer
from skipper.control.rpc.urls import split_address
from skipper.control.rpc.user_secret import SECRET_VARIABLE, read_secret
from skipper.control.support.command_line import run
from skipper.control.support.private_file import check_private
from skipper.control.wire.certificates import Certificates, Tls


def main(argv: Sequence[str], *, prog: str = "skipper names") -> int:
    """Serve names, or list them.

    Args:
        argv: the arguments, without the program's name.
        prog: what was typed before them; shown in messages.

    Returns:
        The exit code: 0 all is well, 1 it could not be done, 2 a wrong command line.
    """
    return run(_parser(prog), argv, _do, errors=(ControlError, OSError, ValueError), status=1)


def _do(given: argparse.Namespace) -> int:
    secret = None if given.secret_file is None else read_secret(given.secret_file)
    return _serve(given, secret) if given.command == "serve" else _list(given, secret)


def _serve(given: argparse.Namespace, secret: bytes | None) -> int:
    host, port = split_address(given.address) if not given.address.endswith(":0") else (given.address[:-2], 0)
    tls = None
    if (given.certificate is None) != (given.key is None):
        raise ValueError("--certificate goes with --key")
    if given.certificate is not None:
        authority = None if given.authority is None else given.authority.read_bytes()
        tls = Tls(authority, given.certificate.read_bytes(), _private(given.key))
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with MetadataServer(host, port, secret=secret, tls=tls, certs=given.certs, insecure=given.insecure) as server:
        sys.stdout.write(f"serving names at {server.address}\n")
        sys.stdout.flush()
        ended.wait()
    return 0


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
        raise ValueError("--certs takes the place of --authority: pass one of them")
    tls = None
    if given.certs is not None:
        tls = Tls(*Certificates(given.certs).pems())
    elif given.authority is not None:
        tls = Tls(given.authority.read_bytes())
    resolver = MetadataResolver(given.address, namespace=ROOT, secret=secret, tls=tls)
    for name, urls in resolver.names(given.prefix).items():
        sys.stdout.write(f"{name}  {' '.join(urls)}\n")
    return 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Names of actors and services, and where they are.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="be the metadata service until interrupted")
    serve.add_argument("--address", default="127.0.0.1:0", help="host:port to listen on; port 0 takes a free one")
    serve.add_argument("--certificate", type=Path, help="PEM file with the certificate, for TLS")
    serve.add_argument("--key", type=Path, help="PEM file with its key")
    serve.add_argument("--certs", type=Path, help="in their place, a folder of skipper certs; clients then need roles")
    serve.add_argument("--insecure", action="store_true", help="listen beyond this host without TLS")
    listing = commands.add_parser("list", help="print absolute names and their URLs")
    listing.add_argument("prefix", nargs="?", default="/", help="with which they begin")
    listing.add_argument("--address", help=f"host:port of the metadata service, instead of {METADATA_VARIABLE}")
    listing.add_argument("--certs", type=Path, help="a folder of skipper certs, for a service that has one")
    for command in (serve, listing):
        command.add_argument("--authority", type=Path, help="PEM file with who signs the other end's certificate")
        command.add_argument("--secret-file", type=Path, help=f"file with the secret, instead of {SECRET_VARIABLE}")
    return parser
