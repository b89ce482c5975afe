"""The secret that actor servers and their clients share where they are not given one.

It is in a file. Processes of one user on one host need nothing else: the first one makes the file, below the same
folder of mode 0700 as the connection files of jobs, and nobody else can read it. Elsewhere, name a file that both
sides can read by ``SKIPPER_SECRET_FILE``.
"""

from __future__ import annotations

import contextlib
import os
import secrets as random
from pathlib import Path

from control import private_file
from control.errors import ResolverError
from control.runtime.join_file import folder, open_folder
from control.wire.actor_session import MIN_SECRET_NBYTES, check_secret
from control.wire.auth import SECRET_NBYTES

SECRET_VARIABLE = "SKIPPER_SECRET_FILE"
"""Environment variable with the path of the file that holds the secret, of 16 bytes or more."""

_NAME = "actors.secret"


def shared_secret(given: bytes | None = None) -> bytes:
    """The secret that a server or client uses: the given one, or else that of the file.

    Raises:
        TypeError: the given one is no ``bytes``.
        ValueError: it is too short.
        UnsafeFileError: others could read the file, or could have written it.
        ResolverError: the file that the environment names cannot be read, or holds too little.
    """
    if given is not None:
        return check_secret(given)
    named = os.environ.get(SECRET_VARIABLE)
    return read_secret(Path(named)) if named else _read_or_make()


def read_secret(path: Path) -> bytes:
    """The secret in a file.

    Raises:
        UnsafeFileError: others could read the file, or could have written it.
        ResolverError: it cannot be read, or holds too little.
    """
    try:
        return private_file.read_secret(path, least_nbytes=MIN_SECRET_NBYTES)
    except ValueError as error:
        raise ResolverError(str(error)) from error


def _read_or_make() -> bytes:
    path = folder() / _NAME
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(mode=0o700)
    with open_folder(path.parent) as where:
        if path.exists():
            return read_secret(path)
        draft = f".{random.token_hex(8)}"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=where)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(random.token_bytes(SECRET_NBYTES))
            with contextlib.suppress(FileExistsError):  # another process was first, and its secret is the one
                os.link(draft, path.name, src_dir_fd=where, dst_dir_fd=where)
        finally:
            os.unlink(draft, dir_fd=where)
    return read_secret(path)
