"""The secret that actor servers and their clients share if they do not get one.

It is the user's secret, in a file (see `trust.user_secret`). Processes of one user on one host need nothing else.
Otherwise set ``SKIPPER_SECRET_FILE`` to a file that both sides can read.
"""

from __future__ import annotations

from pathlib import Path

from skipper import trust
from skipper.control.model.errors import ResolverError, UnsafeFileError
from skipper.control.rpc.wire.session import MIN_SECRET_NBYTES, check_secret
from skipper.control.support import private_file
from skipper.trust import SECRET_VARIABLE

__all__ = ["SECRET_VARIABLE", "read_secret", "shared_secret"]


def shared_secret(given: bytes | None = None) -> bytes:
    """The secret that a server or client uses: the given one, or else the one in the file.

    Raises:
        TypeError: the given one is not ``bytes``.
        ValueError: it is too short.
        UnsafeFileError: others could read the file, or could have written it.
        ResolverError: the file cannot be read or made, or contains too little.
    """
    if given is not None:
        return check_secret(given)
    try:
        return trust.user_secret()
    except trust.PrivateFileError as error:
        raise UnsafeFileError(str(error)) from None
    except (OSError, ValueError) as error:
        raise ResolverError(str(error)) from error


def read_secret(path: Path) -> bytes:
    """The secret in a file.

    Raises:
        UnsafeFileError: others could read the file, or could have written it.
        ResolverError: it cannot be read, or contains too little.
    """
    try:
        return private_file.read_secret(path, least_nbytes=MIN_SECRET_NBYTES)
    except ValueError as error:
        raise ResolverError(str(error)) from error
