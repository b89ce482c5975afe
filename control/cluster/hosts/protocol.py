"""What a script and the agent of a host say to each other: requests and answers in JSON, on a stream like any other.

No byte of it is unpickled: an agent serves the jobs of many scripts and outlives them. The job's secret travels under a
mask that takes the agent's own secret to make, so that an eavesdropper does not learn it, with or without TLS.

An agent that was started for a script first announces in a small file where it listens.
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
"""Whom a script dials at the address of an agent."""

PER_HOST = b"per-host:"
"""How a script's secret begins that agents do not have: see `secret_of_host`."""

_MOST_ANNOUNCED_NBYTES = 4096

_ERRORS: dict[str, type[ControlError]] = {
    error.__name__: error for error in (HostError, HostMismatchError, HostUnreachableError)
}


def request(method: str, content: Mapping[str, Any], number: int) -> ProcessRequest:
    """Something that an agent is asked."""
    return ProcessRequest(0, number, method=method, payload=(json.dumps(content).encode(),))


def answer(number: int, content: Mapping[str, Any]) -> Reply:
    """What an agent answers."""
    return Reply(number, payload=(json.dumps(content).encode(),))


def refusal(number: int, error: ControlError) -> Reply:
    """Why an agent does not do what it was asked."""
    return answer(number, {"error": type(error).__name__, "message": str(error)})


def read(message: Message) -> dict[str, Any]:
    """The content of a request or an answer.

    Raises:
        HostError: it is no such thing.
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
        HostError: the agent refuses, in the words of its error.
    """
    content = read(message)
    if "error" in content:
        raise _ERRORS.get(str(content["error"]), HostError)(str(content.get("message")))
    return content


def versions() -> dict[str, str]:
    """What tells whether a script and the processes of its job on other hosts understand each other, and of whom."""
    return dict(_versions_here())


@functools.cache
def _versions_here() -> dict[str, str]:
    """Looked up once: that reads files, and a script asks for every host that it attaches."""
    from importlib.metadata import PackageNotFoundError, version  # most processes do without

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
    """See that both sides understand each other.

    Functions and classes travel as the bytecode of one minor version of Python, by cloudpickle. What processes say to
    each other is covered by the version of the protocol, whatever Skippers they are.

    Raises:
        HostMismatchError: they do not.
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
    """What a script and the agent of one host both know, given what the script knows.

    That is the same, unless the script's secret is one of which every host has its own part. Such a part is good for
    the agent at one IP, and tells nothing of the others.

    Args:
        secret: the script's.
        host: the IP at which the agent is dialed.
    """
    if not secret.startswith(PER_HOST):
        return secret
    return hmac.digest(secret, b"skipper host " + host.encode(), "sha256").hex().encode()


def mask(secret: bytes, agents_secret: bytes, nonce: bytes) -> bytes:
    """A job's secret as it travels to an agent, and back from that: the same once more.

    Args:
        secret: 32 bytes.
        agents_secret: what both know already.
        nonce: fresh, so that no mask is used twice.
    """
    pad = hmac.digest(agents_secret, b"skipper job secret" + nonce, "sha256")
    return bytes(left ^ right for left, right in zip(secret, pad, strict=True))


def new_nonce() -> bytes:
    """A nonce for `mask`."""
    return secrets.token_bytes(SECRET_NBYTES)


def announce(path: Path, address: str) -> None:
    """Write where this agent listens, ``tcp://IP:PORT``; readers see all of it or nothing, also through NFS.

    Raises:
        OSError: the file cannot be written.
    """
    private_file.replace(path, json.dumps({"address": address, "pid": os.getpid()}).encode(), 0o600)


def announced(path: Path) -> str | None:
    """The address that an agent has announced; None before it has.

    Raises:
        HostError: the file is not one that an agent has written.
    """
    try:
        if not path.exists():
            # An NFS client remembers for a while that a name was not there; listing the folder makes it ask again.
            os.listdir(path.parent)
        with path.open("rb") as file:
            content = json.loads(file.read(_MOST_ANNOUNCED_NBYTES))
        address, pid = content["address"], content["pid"]
        if not isinstance(address, str) or not isinstance(pid, int) or addresses.parse(address)[1] == 0:
            raise ValueError("no address and process")
    except OSError:
        return None  # it is not there yet, or a file server does not answer: the next look tells
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise HostError(f"{path} is not what an agent announces: {error}") from None
    return address
