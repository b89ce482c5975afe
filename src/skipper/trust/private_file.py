"""Files that hold a secret: only this user may have written or read them."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

_MOST_NBYTES = 4096


class PrivateFileError(PermissionError):
    """Other users could read a file with a secret, or could have written it. The secret is not used."""


def check_private(status: os.stat_result, path: Path, is_right_kind: Callable[[int], bool]) -> None:
    """Check that a file or folder belongs to this user, and that nobody else can read or write it.

    Raises:
        PrivateFileError: It is not of the right kind, belongs to another user, or is open to others.
    """
    if not is_right_kind(status.st_mode):
        raise PrivateFileError(f"{path} is not what it should be: a plain file in a folder")
    if status.st_uid != os.geteuid():
        raise PrivateFileError(f"{path} belongs to the user {status.st_uid}, not to {os.geteuid()}")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise PrivateFileError(f"{path} is open to other users (mode {mode:04o}): make it 0600, and its folder 0700")


def read_secret(path: Path, *, least_nbytes: int) -> bytes:
    """Read the secret in a file.

    Raises:
        PrivateFileError: Others could read the file, or could have written it.
        ValueError: It cannot be read, or holds too little.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block
    except OSError as error:
        raise ValueError(f"the secret in {path} cannot be read: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        check_private(os.fstat(fd), path, stat.S_ISREG)
        secret = file.read(_MOST_NBYTES)
    if len(secret) < least_nbytes:
        raise ValueError(f"{path} holds {len(secret)} bytes: a secret has {least_nbytes} or more")
    return secret
