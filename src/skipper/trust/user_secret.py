"""The secret that processes of one user share if nobody gives them one and they belong to no common job.

It is in a file that nobody but this user may read or write. On one host that is all: the first process makes the file,
in a folder of mode 0700. Between hosts, ``SKIPPER_SECRET_FILE`` names a file that all sides can read.
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
    return Path(_folder())


def _folder() -> str:  # no Path: every process of a user comes by here when it first needs a buffer of another
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        return os.path.join(runtime, "skipper")
    return os.path.join(_temporary(), f"skipper-{os.geteuid()}")


def _temporary() -> str:
    """The folder for temporary files: as `tempfile.gettempdir` finds it, which makes and removes a file there first."""
    for variable in ("TMPDIR", "TEMP", "TMP"):
        named = os.environ.get(variable)
        if named and os.access(named, os.W_OK | os.X_OK) and os.path.isdir(named):
            return os.path.abspath(named)
    return "/tmp"


def user_secret() -> bytes:
    """The secret of this user: from the file that the environment names, or else from their own, made if it is missing.

    Raises:
        PrivateFileError: Others could read the file, or could have written it.
        ValueError: It cannot be read, or holds too little.
        OSError: It cannot be made.
    """
    named = os.environ.get(SECRET_VARIABLE)
    return read_secret(named, least_nbytes=MIN_SECRET_NBYTES) if named else _read_or_make()


def _read_or_make() -> bytes:
    folder = _folder()
    path = os.path.join(folder, _NAME)
    where = _open(folder)
    try:
        check_private(os.fstat(where), folder, stat.S_ISDIR)
        with contextlib.suppress(FileNotFoundError):
            return read_secret(path, folder=where, least_nbytes=MIN_SECRET_NBYTES)
        _make(_NAME, where)
        return read_secret(path, folder=where, least_nbytes=MIN_SECRET_NBYTES)
    finally:
        os.close(where)


def _open(folder: str) -> int:
    """A descriptor of the folder, which is made if it is missing.

    Raises:
        PrivateFileError: A link stands there.
        OSError: It cannot be made or opened.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with contextlib.suppress(FileNotFoundError):
            return os.open(folder, flags)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        return os.open(folder, flags)
    except OSError:
        if os.path.islink(folder):
            message = f"{folder} is a link, which may lead to a folder that holds something else"
            raise PrivateFileError(message) from None
        raise


def _make(name: str, where: int) -> None:
    draft = f".{random.token_hex(8)}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=where)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(random.token_bytes(_SECRET_NBYTES))
        with contextlib.suppress(FileExistsError):  # another process was first, and its secret counts
            os.link(draft, name, src_dir_fd=where, dst_dir_fd=where)  # whole, or not at all
    finally:
        os.unlink(draft, dir_fd=where)
