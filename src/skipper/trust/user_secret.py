"""The secret that processes of one user share if nobody gives them one and they belong to no common job.

It is in a file that only this user may read or write. On one host nothing else is needed: the first process makes the
file, in a folder of mode 0700. Between hosts, ``SKIPPER_SECRET_FILE`` names a file that all sides can read.
"""

import contextlib
import os
import secrets as random
import stat
from pathlib import Path

from skipper.trust.private_file import PrivateFileError, check_private, read_secret

SECRET_VARIABLE = "SKIPPER_SECRET_FILE"
"""Environment variable with the path of the file that holds the secret, of 16 bytes or more."""

MIN_SECRET_NBYTES = 16

_NAME = "actors.secret"
_SECRET_NBYTES = 32


def folder() -> Path:
    """The folder of this user's secrets and connection files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        return Path(runtime) / "skipper"
    import tempfile  # most processes do not need it

    return Path(tempfile.gettempdir()) / f"skipper-{os.geteuid()}"


def user_secret() -> bytes:
    """The secret of this user: from the file that the environment names, or else from their own, made if it is missing.

    Raises:
        PrivateFileError: Others could read the file, or could have written it.
        ValueError: It cannot be read, or holds too little.
        OSError: It cannot be made.
    """
    named = os.environ.get(SECRET_VARIABLE)
    return read_secret(Path(named), least_nbytes=MIN_SECRET_NBYTES) if named else _read_or_make()


def _read_or_make() -> bytes:
    path = folder() / _NAME
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(mode=0o700)
    if path.parent.is_symlink():  # for the message; O_NOFOLLOW is the check
        raise PrivateFileError(f"{path.parent} is a link, which could lead to another folder")
    where = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        check_private(os.fstat(where), path.parent, stat.S_ISDIR)
        if not path.exists():
            _make(path.name, where)
    finally:
        os.close(where)
    return read_secret(path, least_nbytes=MIN_SECRET_NBYTES)


def _make(name: str, where: int) -> None:
    draft = f".{random.token_hex(8)}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=where)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(random.token_bytes(_SECRET_NBYTES))
        with contextlib.suppress(FileExistsError):  # another process was first, and its secret counts
            os.link(draft, name, src_dir_fd=where, dst_dir_fd=where)  # complete, or not at all
    finally:
        os.unlink(draft, dir_fd=where)
