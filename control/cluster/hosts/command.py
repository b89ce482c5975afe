"""``skipper host``: the agent of this machine, and commands to agents."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from skipper.commandline import (
    DONE,
    FAILED,
    INTERRUPTED,
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
    number,
    run,
    seconds,
    whole,
    write_json,
)
from skipper.control.cluster.hosts import adopted, protocol
from skipper.control.cluster.hosts.agent_link import AgentLink
from skipper.control.cluster.hosts.attach import LEAST_SECRET_NBYTES, read_secret
from skipper.control.model.errors import ControlError, InsecureHostError
from skipper.control.wire import addresses, grpc_poller
from skipper.control.wire.certificates import SECRET, Certificates
from skipper.control.wire.identity import Role

_TIMEOUT_S = 10.0
_MOST_SECRET_NBYTES = 4096


def main(argv: Sequence[str], *, prog: str = "skipper host") -> int:
    """Run one of the commands.

    Args:
        argv: the arguments, without the program's name.
        prog: what was typed before them.

    Returns:
        The exit code; ``--help`` lists them.
    """
    errors = (ControlError, ValueError, OSError)
    return run(parser(prog), argv, lambda given: int(given.run(given)), errors=errors, status=FAILED)


def parser(prog: str) -> CommandParser:
    """The parser of the command."""
    own = CommandParser(
        prog=prog, description="Let scripts on other machines start processes of their jobs on this one."
    )
    commands = own.add_subparsers(title="commands", required=True, metavar="COMMAND")

    secret = add_command(commands, "secret", "make a secret for agents and scripts, in a new file of mode 0600")
    secret.add_argument("file", metavar="FILE", help="the file to make")
    kind = secret.add_mutually_exclusive_group()
    kind.add_argument(
        "--per-host",
        action="store_true",
        help="make a secret for scripts; with --of, the secret of each host is made from it",
    )
    kind.add_argument(
        "--of", metavar="FILE", help="make the secret of the host --host, from the scripts' secret in this file"
    )
    secret.add_argument("--host", metavar="IP", help="with --of: IP address at which scripts reach the agent")
    secret.set_defaults(run=_secret)

    serve = add_command(commands, "serve", "run the agent of this machine, until SIGTERM or a drain")
    add_insecure(serve)
    serve.add_argument(
        "--announce", metavar="FILE", help="write the agent's address and pid to this file, as JSON, once it listens"
    )
    serve.add_argument("--idle-timeout", type=seconds, metavar="S", help="end after this many seconds without a job")
    serve.add_argument("--until-eof", action="store_true", help="end when standard input ends")
    serve.set_defaults(run=_serve)

    drain = add_command(
        commands,
        "drain",
        "tell an agent to take no new jobs, and to end after its last job",
        exit_codes={FAILED: "the agent cannot be reached, or has not ended within --timeout"},
    )
    drain.add_argument(
        "--timeout",
        type=number(zero=True),
        default=0.0,
        metavar="S",
        help="seconds to wait until it has ended (default: 0)",
    )
    drain.set_defaults(run=_drain)

    status = add_command(commands, "status", "show versions and jobs of an agent")
    add_timeout(status, _TIMEOUT_S, "seconds to wait for the agent's answer")
    add_json(status, "the answer")
    status.set_defaults(run=_status)

    serve.add_argument(
        "--fd",
        type=whole(0, 1 << 20),
        metavar="N",
        help="use the listening socket that this process has inherited as file descriptor N "
        "(default without --address: the socket that systemd passes by LISTEN_FDS)",
    )
    serve.add_argument("--secret-stdin", action="store_true", help="the secret is the first line of standard input")
    for command in (serve, drain, status):
        command.add_argument("--address", metavar="tcp://HOST:PORT", help="address that the agent listens on")
        add_host(command, default=None, what="with --port, instead of --address: the agent's IP")
        add_port(command, what="with --host, instead of --address: the agent's port")
        add_secret_file(command, "the file secret in the folder --certs")
        add_certs(command)
    return own


def _address(given: argparse.Namespace) -> str | None:
    """The agent's address, however it was given; None if it was not."""
    if given.host is None and given.port is None:
        return None if given.address is None else str(given.address)
    if given.address is not None or given.host is None or given.port is None:
        raise BadArgumentsError("pass --address tcp://HOST:PORT, or --host with --port")
    return addresses.SCHEME + (f"[{given.host}]" if ":" in given.host else given.host) + f":{given.port}"


def _secret(given: argparse.Namespace) -> int:
    if (given.of is None) != (given.host is None):
        raise BadArgumentsError("--of and --host go together: the file of the scripts' secret, and the IP of the host")
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
    host, port = listening.getsockname()[:2] if listening is not None else addresses.parse(str(_address(given)))
    if given.certs is None and not given.insecure and not addresses.is_loopback(host):
        raise InsecureHostError(
            f"other machines can reach {host}: pass --certs for TLS, or --insecure where the whole network is trusted"
        )
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # it would report every failed TLS handshake
    grpc_poller.choose()
    from skipper.control.cluster.hosts.agent import HostAgent

    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    secret = _secret_of(given)
    if secret.startswith(protocol.PER_HOST):
        raise ValueError(
            "this is the secret of scripts, not of a host: make the secret of this host by skipper host secret "
            "--of FILE --host IP"
        )
    agent = HostAgent(host, port, secret, certs=given.certs, idle_timeout_s=given.idle_timeout, listening=listening)
    agent.end_by_signals()
    interrupts: list[int] = []

    def interrupt(number: int, _: object) -> None:
        interrupts.append(number)
        agent.end()

    signal.signal(signal.SIGINT, interrupt)
    if given.until_eof:
        agent.end_with(sys.stdin.fileno())
    if given.announce is not None:
        protocol.announce(Path(given.announce), addresses.SCHEME + agent.address)
    sys.stdout.write(f"serving at {addresses.SCHEME}{agent.address}\n")
    sys.stdout.flush()
    agent.run()
    return INTERRUPTED if interrupts else DONE


def _listening(given: argparse.Namespace) -> socket.socket | None:
    """The socket that the agent should take over, if any."""
    if _address(given) is not None:
        if given.fd is not None:
            raise BadArgumentsError("pass --address or --fd, not both: a socket that listens already has its address")
        return None
    fd = adopted.passed_on() if given.fd is None else given.fd
    if fd is None:
        raise BadArgumentsError(
            "pass --address tcp://HOST:PORT, or a socket that listens already: --fd N, or LISTEN_FDS"
        )
    return adopted.adopt(fd)


def _drain(given: argparse.Namespace) -> int:
    with _connect(given, _TIMEOUT_S) as link:
        jobs = link.ask("drain", {}, timeout=_TIMEOUT_S)["jobs"]
        sys.stdout.write(f"{jobs} jobs are left\n")
        return 0 if given.timeout <= 0 or link.wait_for_end(given.timeout) else 1


def _status(given: argparse.Namespace) -> int:
    with _connect(given, given.timeout) as link:
        there = link.ask("status", {}, timeout=given.timeout)
    write_json({"name": link.name, "versions": there["versions"], "jobs": there["jobs"]}, given.json)
    if given.json == STDOUT:
        return 0
    versions = ", ".join(f"{name} {version}" for name, version in there["versions"].items())
    sys.stdout.write(f"{link.name}: {versions}; jobs: {len(there['jobs'])}\n")
    return 0


def _connect(given: argparse.Namespace, timeout_s: float) -> AgentLink:
    address = _address(given)
    if address is None:
        raise BadArgumentsError("there is no address of an agent: pass --address tcp://HOST:PORT")
    host, port = addresses.parse(address)
    certificates = None if given.certs is None else Certificates(given.certs)
    if certificates is not None:
        certificates.require(Role.SCRIPT, "what agents are asked")
    return AgentLink(host, port, protocol.secret_of_host(_secret_of(given), host), certificates, timeout=timeout_s)


def _secret_of(given: argparse.Namespace) -> bytes:
    if getattr(given, "secret_stdin", False):
        return _secret_from(sys.stdin.fileno())
    if given.secret_file is None and given.certs is None:
        raise BadArgumentsError("pass --secret-file FILE (skipper host secret FILE makes one), or --certs DIR")
    return read_secret(Path(given.secret_file) if given.secret_file is not None else Path(given.certs) / SECRET)


def _secret_from(fd: int) -> bytes:
    """The first line of a pipe; the rest is not read."""
    with open(fd, "rb", buffering=0, closefd=False) as pipe:
        secret = pipe.readline(_MOST_SECRET_NBYTES).strip()
    if len(secret) < LEAST_SECRET_NBYTES:
        raise ValueError(f"the first line of standard input must be a secret of at least {LEAST_SECRET_NBYTES} bytes")
    return secret
