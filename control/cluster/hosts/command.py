"""``skipper host``: the agent of this machine, and what can be said to agents."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import logging
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from skipper.control.cluster.hosts import adopted, protocol
from skipper.control.cluster.hosts.agent_link import AgentLink
from skipper.control.cluster.hosts.attach import LEAST_SECRET_NBYTES, read_secret
from skipper.control.model.errors import ControlError, InsecureHostError
from skipper.control.support.command_line import EXIT_CODES, run
from skipper.control.wire import addresses, grpc_poller
from skipper.control.wire.certificates import SECRET, Certificates
from skipper.control.wire.identity import Role


def main(argv: Sequence[str], *, prog: str = "skipper host") -> int:
    """Run one of the commands.

    Args:
        argv: the arguments, without the program's name.
        prog: what was typed before them.

    Returns:
        The exit code; ``--help`` lists them.
    """
    parser = _parser(prog)
    return run(parser, argv, lambda given: int(given.run(given)), errors=(ControlError, ValueError, OSError), status=1)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Let scripts on other machines start processes of their jobs on this one.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    secret = commands.add_parser("secret", help="make a secret for agents and scripts, in a new file of mode 0600")
    secret.add_argument("file", metavar="FILE")
    kind = secret.add_mutually_exclusive_group()
    kind.add_argument("--per-host", action="store_true", help="make one for scripts alone, and each host's part of it:")
    kind.add_argument("--of", metavar="FILE", help="make the part, of the secret in this file, of the host --host")
    secret.add_argument("--host", metavar="IP", help="with --of: where scripts reach the agent")
    secret.set_defaults(run=_secret)

    serve = commands.add_parser("serve", help="be the agent of this machine, until SIGTERM or a drain")
    serve.add_argument("--insecure", action="store_true", help="listen for other machines without TLS")
    serve.add_argument("--announce", metavar="FILE", help="write address and pid there, as JSON, once it listens")
    serve.add_argument("--idle-timeout", type=float, metavar="S", help="end after so long without a job")
    serve.add_argument("--until-eof", action="store_true", help="end when standard input does")
    serve.set_defaults(run=_serve)

    drain = commands.add_parser("drain", help="have an agent take no new jobs, and end with the last that it has")
    drain.add_argument("--timeout", type=float, default=0.0, metavar="S", help="wait so long for its end (default: 0)")
    drain.set_defaults(run=_drain)

    status = commands.add_parser("status", help="what an agent is and has")
    status.set_defaults(run=_status)

    serve.add_argument(
        "--fd",
        type=int,
        metavar="N",
        help="take over the listening socket that this process has inherited as descriptor N; "
        "without --address and this: the one that systemd passes on (LISTEN_FDS)",
    )
    serve.add_argument("--secret-stdin", action="store_true", help="the secret is the first line of standard input")
    for command in (serve, drain, status):
        command.add_argument(
            "--address", required=command is not serve, metavar="tcp://HOST:PORT", help="where the agent listens"
        )
        command.add_argument("--secret-file", metavar="FILE", help="the agents' secret; default: secret in --certs")
        command.add_argument("--certs", metavar="DIR", help="the folder of this machine's certificates, for TLS")
    return parser


def _secret(given: argparse.Namespace) -> int:
    if (given.of is None) != (given.host is None):
        raise ValueError("--of and --host go together: the file of the scripts' secret, and the IP of the host")
    text = secrets.token_hex(32)
    if given.per_host:
        text = protocol.PER_HOST.decode() + text
    elif given.of is not None:
        whole = read_secret(Path(given.of))
        if not whole.startswith(protocol.PER_HOST):
            raise ValueError(f"{given.of} holds no secret that was made with --per-host")
        text = protocol.secret_of_host(whole, str(ipaddress.ip_address(given.host))).decode()
    fd = os.open(given.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(text + "\n")
    return 0


def _serve(given: argparse.Namespace) -> int:
    listening = _listening(given)
    with listening or contextlib.nullcontext():
        return _serve_at(given, listening)


def _serve_at(given: argparse.Namespace, listening: socket.socket | None) -> int:
    host, port = listening.getsockname()[:2] if listening is not None else addresses.parse(given.address)
    if given.certs is None and not given.insecure and not addresses.is_loopback(host):
        raise InsecureHostError(
            f"other machines reach {host}: pass --certs for TLS, or --insecure where the whole network is trusted"
        )
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # it would tell of every stranger whose handshake fails
    grpc_poller.choose()
    from skipper.control.cluster.hosts.agent import HostAgent

    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    secret = _secret_of(given)
    if secret.startswith(protocol.PER_HOST):
        raise ValueError(
            "that is the secret of scripts: skipper host secret --of FILE --host IP makes this host's part"
        )
    agent = HostAgent(host, port, secret, certs=given.certs, idle_timeout_s=given.idle_timeout, listening=listening)
    agent.end_by_signals()
    if given.until_eof:
        agent.end_with(sys.stdin.fileno())
    if given.announce is not None:
        protocol.announce(Path(given.announce), addresses.SCHEME + agent.address)
    sys.stdout.write(f"serving at {addresses.SCHEME}{agent.address}\n")
    sys.stdout.flush()
    agent.run()
    return 0


def _listening(given: argparse.Namespace) -> socket.socket | None:
    """The socket that the agent is to take over, if any."""
    if given.address is not None:
        if given.fd is not None:
            raise ValueError("pass --address or --fd, not both: a socket that listens already has its address")
        return None
    fd = adopted.passed_on() if given.fd is None else given.fd
    if fd is None:
        raise ValueError("pass --address tcp://HOST:PORT, or a socket that listens already: --fd N, or LISTEN_FDS")
    return adopted.adopt(fd)


def _drain(given: argparse.Namespace) -> int:
    with _connect(given) as link:
        jobs = link.ask("drain", {}, timeout=_TIMEOUT_S)["jobs"]
        sys.stdout.write(f"{jobs} jobs are left\n")
        return 0 if given.timeout <= 0 or link.wait_for_end(given.timeout) else 1


def _status(given: argparse.Namespace) -> int:
    with _connect(given) as link:
        there = link.ask("status", {}, timeout=_TIMEOUT_S)
    versions = ", ".join(f"{name} {version}" for name, version in there["versions"].items())
    sys.stdout.write(f"{link.name}: {versions}; jobs: {len(there['jobs'])}\n")
    return 0


_TIMEOUT_S = 10.0
_MOST_SECRET_NBYTES = 4096


def _connect(given: argparse.Namespace) -> AgentLink:
    host, port = addresses.parse(given.address)
    certificates = None if given.certs is None else Certificates(given.certs)
    if certificates is not None:
        certificates.require(Role.SCRIPT, "what agents are asked")
    return AgentLink(host, port, protocol.secret_of_host(_secret_of(given), host), certificates, timeout=_TIMEOUT_S)


def _secret_of(given: argparse.Namespace) -> bytes:
    if getattr(given, "secret_stdin", False):
        return _secret_from(sys.stdin.fileno())
    if given.secret_file is None and given.certs is None:
        raise ValueError("pass --secret-file FILE (skipper host secret FILE makes one), or --certs DIR")
    return read_secret(Path(given.secret_file) if given.secret_file is not None else Path(given.certs) / SECRET)


def _secret_from(fd: int) -> bytes:
    """The first line of a pipe, and nothing of what follows."""
    with open(fd, "rb", buffering=0, closefd=False) as pipe:
        secret = pipe.readline(_MOST_SECRET_NBYTES).strip()
    if len(secret) < LEAST_SECRET_NBYTES:
        raise ValueError(f"a secret of at least {LEAST_SECRET_NBYTES} bytes was to be the first line of standard input")
    return secret
