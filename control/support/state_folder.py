"""The folder for this user's files that outlive a job: its output, and its record."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from skipper.control.model.errors import UnsafeFileError
from skipper.control.support.private_file import make_folder


def state_folder(kind: str, variable: str) -> Path:
    """The folder for one kind of files: the one that the variable names, else one in the user's folder for state.

    If that is not writable, as in containers without a home, it is one for temporary files. It is not created here.

    Args:
        kind: what it is called, ``"logs"``.
        variable: the environment variable that names another one.
    """
    if named := os.environ.get(variable):
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME", "")
    home = Path(state) if os.path.isabs(state) else Path(os.path.expanduser("~"), ".local", "state")
    nearest = next(folder for folder in (home, *home.parents) if folder.exists())
    if home.is_absolute() and os.access(nearest, os.W_OK | os.X_OK):
        return home / "skipper" / kind
    return Path(tempfile.gettempdir(), f"skipper-{os.geteuid()}-{kind}")


def make_own_folder(path: Path, variable: str) -> None:
    """Create the folder if it is missing; nobody else may write to it.

    Args:
        path: the result of `state_folder`.
        variable: the environment variable that would name another one, for the message.

    Raises:
        UnsafeFileError: (a `PermissionError`) it belongs to others, or others may write there.
        OSError: it cannot be created.
    """
    make_folder(path)
    status = os.stat(path)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise UnsafeFileError(f"{path} belongs to others, or others may write there: set {variable} to another folder")
