"""The messages between a script and the agent of a host: requests and answers in JSON, on a stream like any other.

No byte of it is unpickled: an agent serves the jobs of many scripts and outlives them. The job's secret travels under a
mask made with the agent's own secret, so that an eavesdropper does not learn it, with or without TLS.

An agent that was started for a script first writes its address into a small file.
"""

from __future__ import annotations

import functools
import hmac
import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skipper.control.model.errors import ControlError, HostError, HostMismatchError, HostUnreachableError
from skipper.control.support import private_file
from skipper.control.wire import addresses
from skipper.control.wire.auth import SECRET_NBYTES
from skipper.control.wire.messages import Message, ProcessRequest, Reply
from skipper.control.wire.version import VERSION as PROTOCOL
from skipper.control.wire.version import obstacle

AGENT = "host-agent"
"""The name that a script dials at the address of an agent."""

PER_HOST = b"per-host:"
"""Prefix of a script's secret from which each host's secret is made: see `secret_of_host`."""

_MOST_ANNOUNCED_NBYTES = 4096

_ERRORS: dict[str, type[ControlError]] = {
    error.__name__: error for error in (HostError, HostMismatchError, HostUnreachableError)
}


def request(method: str, content: Mapping[str, Any], number: int) -> ProcessRequest:
    """A request to an agent."""
    return ProcessRequest(0, number, method=method, payload=(json.dumps(content).encode(),))


def answer(number: int, content: Mapping[str, Any]) -> Reply:
    """An agent's answer."""
    return Reply(number, payload=(json.dumps(content).encode(),))


def refusal(number: int, error: ControlError) -> Reply:
    """An agent's refusal."""
    return answer(number, {"error": type(error).__name__, "message": str(error)})


def read(message: Message) -> dict[str, Any]:
    """The content of a request or an answer.

    Raises:
        HostError: it is neither.
    """
    try:
        content = json.loads(bytes(message.payload[0]))  # type: ignore[arg-type]  # nothing here is lent
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise HostError(f"the other side runs another version of the protocol: {error}") from None
    if not isinstance(content, dict):
        raise HostError("the other side runs another version of the protocol")
    return content


def read_answer(message: Message) -> dict[str, Any]:
    """The content of an answer.

    Raises:
        HostError: the agent refuses; with the text of its error.
    """
    content = read(message)
    if "error" in content:
        raise _ERRORS.get(str(content["error"]), HostError)(str(content.get("message")))
    return content


def versions() -> dict[str, str]:
    """The versions that decide whether a script and its job's processes on other hosts are compatible."""
    return dict(_versions_here())


@functools.cache
def _versions_here() -> dict[str, str]:
    """The versions, looked up once: that reads files, and a script needs them for every host that it attaches."""
    from importlib.metadata import PackageNotFoundError, version  # most processes do not need it

    try:
        skipper = version("skipper-mesh")
    except PackageNotFoundError:
        skipper = "unknown"
    major, minor = sys.version_info[:2]
    return {
        "skipper": skipper,
        "protocol": PROTOCOL,
        "python": f"{major}.{minor}",
        "cloudpickle": version("cloudpickle"),
    }


def check_versions(theirs: Mapping[str, object], who: str) -> None:
    """Check that both sides are compatible.

    Functions and classes travel as the bytecode of one minor version of Python, by cloudpickle. The messages between
    processes depend only on the version of the protocol, not on that of Skipper.

    Raises:
        HostMismatchError: they are not.
    """
    ours = versions()
    different = [
        f"{name} {theirs.get(name)} there and {ours[name]} on {who}"
        for name in ("python", "cloudpickle")
        if ours[name] != theirs.get(name)
    ]
    if (why := obstacle(theirs.get("protocol"))) is not None:
        different.append(f"Skipper {theirs.get('skipper')} there and {ours['skipper']} on {who}, where {why}")
    if different:
        raise HostMismatchError(f"the script cannot use {who}: {'; '.join(different)}")


def secret_of_host(secret: bytes, host: str) -> bytes:
    """The secret that a script and the agent of one host share, given the script's secret.

    That is the same secret, unless each host's secret is made from the script's. Such a secret is valid for the agent
    at one IP, and reveals nothing about the others.

    Args:
        secret: the script's secret.
        host: the IP at which the agent is dialed.
    """
    if not secret.startswith(PER_HOST):
        return secret
    return hmac.digest(secret, b"skipper host " + host.encode(), "sha256").hex().encode()


def mask(secret: bytes, agents_secret: bytes, nonce: bytes) -> bytes:
    """Mask a job's secret for the way to an agent, or unmask it: the operation is its own inverse.

    Args:
        secret: 32 bytes.
        agents_secret: the secret that both know already.
        nonce: fresh, so that no mask is used twice.
    """
    pad = hmac.digest(agents_secret, b"skipper job secret" + nonce, "sha256")
    return bytes(left ^ right for left, right in zip(secret, pad, strict=True))


def new_nonce() -> bytes:
    """A nonce for `mask`."""
    return secrets.token_bytes(SECRET_NBYTES)


def announce(path: Path, address: str) -> None:
    """Write where this agent listens, ``tcp://IP:PORT``; readers see all of it or nothing, even through NFS.

    Raises:
        OSError: the file cannot be written.
    """
    private_file.replace(path, json.dumps({"address": address, "pid": os.getpid()}).encode(), 0o600)


def announced(path: Path) -> str | None:
    """The address that an agent has announced; None before it has.

    Raises:
        HostError: the file is not from an agent.
    """
    try:
        if not path.exists():
            # An NFS client caches for a while that a name does not exist; listing the folder makes it ask again.
            os.listdir(path.parent)
        with path.open("rb") as file:
            content = json.loads(file.read(_MOST_ANNOUNCED_NBYTES))
        address, pid = content["address"], content["pid"]
        if not isinstance(address, str) or not isinstance(pid, int) or addresses.parse(address)[1] == 0:
            raise ValueError("no address and process")
    except OSError:
        return None  # it is not there yet, or a file server does not answer: the next look shows it
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise HostError(f"{path} is not what an agent announces: {error}") from None
    return address
