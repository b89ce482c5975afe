"""Files that hold a secret: nobody but this user may have written or read them. With the errors of `control`.

And files that others read while they are replaced.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from skipper import trust
from skipper.control.model.errors import UnsafeFileError


def check_private(status: os.stat_result, path: Path, is_right_kind: Callable[[int], bool]) -> None:
    """See to it that something belongs to this user, and that nobody else can read or write it.

    Raises:
        UnsafeFileError: that is not so.
    """
    try:
        trust.check_private(status, path, is_right_kind)
    except trust.PrivateFileError as error:
        raise UnsafeFileError(str(error)) from None


def read_secret(path: Path, *, least_nbytes: int) -> bytes:
    """The secret in a file, as it is there.

    Raises:
        UnsafeFileError: others could read the file, or could have written it.
        ValueError: it cannot be read, or holds too little.
    """
    try:
        return trust.read_secret(path, least_nbytes=least_nbytes)
    except trust.PrivateFileError as error:
        raise UnsafeFileError(str(error)) from None


def replace(path: Path, content: bytes, mode: int) -> None:
    """Write a file, or replace one: who reads it finds the one or the other whole, also through NFS.

    Args:
        path: the file; its folder is there.
        content: what it is to hold.
        mode: its permissions, whatever the umask is.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(content)
            file.flush()
            os.fsync(fd)
        os.rename(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
