"""Files and folders that only this user may access: for secrets, and for the output of processes.

Also: files that others read while they are replaced.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from skipper import trust
from skipper.control.model.errors import UnsafeFileError


def check_private(status: os.stat_result, path: Path, is_right_kind: Callable[[int], bool]) -> None:
    """Check that something belongs to this user, and that nobody else can read or write it.

    Raises:
        UnsafeFileError: that is not so.
    """
    try:
        trust.check_private(status, path, is_right_kind)
    except trust.PrivateFileError as error:
        raise UnsafeFileError(str(error)) from None


def read_secret(path: Path, *, least_nbytes: int) -> bytes:
    """The secret in a file, unchanged.

    Raises:
        UnsafeFileError: others could read the file, or could have written it.
        ValueError: it cannot be read, or holds too little.
    """
    try:
        return trust.read_secret(path, least_nbytes=least_nbytes)
    except trust.PrivateFileError as error:
        raise UnsafeFileError(str(error)) from None


def replace(path: Path, content: bytes, mode: int) -> None:
    """Write a file, or replace one: a reader finds the old or the new one complete, also through NFS.

    Args:
        path: the file; its folder exists.
        content: its content.
        mode: its permissions, for any umask.

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


def open_log(path: Path) -> int:
    """A new or existing file of mode 0600 to append to; the caller closes its descriptor.

    Raises:
        UnsafeFileError: (a `PermissionError`) it is not a plain file of this user: the output would go elsewhere.
        OSError: it cannot be created, or is a link.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
            raise UnsafeFileError(f"{path} is not a file of the user {os.geteuid()} alone: remove it")
        if status.st_mode & 0o077:
            os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_own(path: Path) -> int:
    """A plain file of this user to read; the caller closes its descriptor.

    Raises:
        UnsafeFileError: (a `PermissionError`) it is a link, not a plain file, or another user's.
        OSError: it cannot be opened.
    """
    if path.is_symlink():  # for the message; O_NOFOLLOW is the check
        raise UnsafeFileError(f"{path} is a link, which could lead to another user's file: it is not followed")
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(fd)
        raise UnsafeFileError(f"{path} is not a file of the user {os.geteuid()}: it is not read")
    return fd


def make_folder(path: Path) -> None:
    """Create a folder if it is missing; it and missing folders above it get mode 0700.

    Raises:
        OSError: it cannot be created, or is not a folder.
    """
    for missing in [path, *path.parents][::-1]:
        with contextlib.suppress(FileExistsError):
            missing.mkdir(mode=0o700)
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is not a folder")
