"""The secret that both ends of a measurement have to hold: a file of the user's, or one that the server makes up."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from skipper import trust
from skipper.benchmarks.errors import UsageError

__all__ = ["TOKEN_VARIABLE", "BandwidthSecret", "made_up", "secret_of"]

TOKEN_VARIABLE = "SKIPPER_BW_TOKEN"
"""The variable with a server's new secret for the client: other users cannot read the environment of a process."""


@dataclass(frozen=True, slots=True)
class BandwidthSecret:
    """A secret, and how a client's command line begins in order to pass it; empty if the secret is in a file."""

    value: bytes
    prefix: str = ""

    def __repr__(self) -> str:
        return "<BandwidthSecret>"


def secret_of(secret_file: str | None) -> BandwidthSecret | None:
    """The secret that was given: ``--secret-file``, the variable, or the file that SKIPPER_SECRET_FILE names.

    Raises:
        UsageError: A file cannot be read, is too short, or others can read it.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    if secret_file is None and token:
        return BandwidthSecret(token.encode(), f"{TOKEN_VARIABLE}={token} ")
    named = secret_file or os.environ.get(trust.SECRET_VARIABLE)
    if not named:
        return None
    try:
        return BandwidthSecret(trust.read_secret(Path(named), least_nbytes=trust.MIN_SECRET_NBYTES).strip())
    except (trust.PrivateFileError, ValueError) as error:
        raise UsageError(str(error)) from error


def made_up() -> BandwidthSecret:
    """A new secret, which nobody else knows."""
    token = secrets.token_hex(16)
    return BandwidthSecret(token.encode(), f"{TOKEN_VARIABLE}={token} ")
