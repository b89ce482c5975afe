"""Files and folders for what processes write: for this user alone, whatever the umask says."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from skipper.control.model.errors import UnsafeFileError


def open_log(path: Path) -> int:
    """A file of mode 0600 to append to, new or the one that there is; the caller closes its descriptor.

    Raises:
        UnsafeFileError: (a `PermissionError`) it is no plain file of this user: what is written would go elsewhere.
        OSError: it cannot be made, or is a link.
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


def make_folder(path: Path) -> None:
    """Have a folder there; it and what is missing above it get mode 0700.

    Raises:
        OSError: it cannot be made, or is no folder.
    """
    for missing in [path, *path.parents][::-1]:
        with suppress(FileExistsError):
            missing.mkdir(mode=0o700)
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is no folder")
