"""Files that hold a secret: nobody but this user may have written or read them."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

_MOST_NBYTES = 4096


class PrivateFileError(PermissionError):
    """Other users could read a file with a secret, or could have written it. The secret is not used."""


class SecretMissingError(ValueError, FileNotFoundError):
    """There is no such file."""


def check_private(status: os.stat_result, path: Path | str, is_right_kind: Callable[[int], bool]) -> None:
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


def read_secret(path: Path | str, *, least_nbytes: int, folder: int | None = None) -> bytes:
    """Read the secret in a file.

    Args:
        path: Of the file.
        least_nbytes: What a secret of that kind has.
        folder: A descriptor of the folder that it lies in, where that was opened.

    Raises:
        PrivateFileError: Others could read the file, or could have written it.
        SecretMissingError: There is no such file.
        ValueError: It cannot be read, or holds too little.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not block
    fd = -1
    try:
        fd = os.open(path if folder is None else os.path.basename(path), flags, dir_fd=folder)
        check_private(os.fstat(fd), path, stat.S_ISREG)
        secret = os.read(fd, _MOST_NBYTES)
    except PrivateFileError:
        raise
    except OSError as error:
        kind = SecretMissingError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"the secret in {path} cannot be read: {error.strerror}") from error
    finally:
        if fd >= 0:
            os.close(fd)
    if len(secret) < least_nbytes:
        raise ValueError(f"{path} holds {len(secret)} bytes: a secret has {least_nbytes} or more")
    return secret
