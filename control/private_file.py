"""Files that hold a secret: nobody but this user may have written or read them. With the errors of `control`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import skipper_trust
from control.errors import UnsafeFileError


def check_private(status: os.stat_result, path: Path, is_right_kind: Callable[[int], bool]) -> None:
    """See to it that something belongs to this user, and that nobody else can read or write it.

    Raises:
        UnsafeFileError: that is not so.
    """
    try:
        skipper_trust.check_private(status, path, is_right_kind)
    except skipper_trust.UnsafeFileError as error:
        raise UnsafeFileError(str(error)) from None


def read_secret(path: Path, *, least_nbytes: int) -> bytes:
    """The secret in a file, as it is there.

    Raises:
        UnsafeFileError: others could read the file, or could have written it.
        ValueError: it cannot be read, or holds too little.
    """
    try:
        return skipper_trust.read_secret(path, least_nbytes=least_nbytes)
    except skipper_trust.UnsafeFileError as error:
        raise UnsafeFileError(str(error)) from None
