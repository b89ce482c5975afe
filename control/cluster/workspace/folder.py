"""`Folder`: a folder by its descriptor; its content is opened from there, name by name, without following links.

Another user may prepare a target, or replace a part of it during a sync. So nothing below a folder is ever opened by a
whole path: each component is opened in the previous one, and must be a folder itself.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from skipper.control.model.errors import WorkspaceError

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ENTER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_LINKS = 40
"""How many links a path may contain, as in the kernel (path_resolution(7))."""


class Folder:
    """An open folder; a context manager.

    Args:
        fd: its descriptor, which is closed with this.
        path: its name in messages.
        is_ours: whether everything in it must belong to this user; then folders in it that others may write to are
            closed to them when they are entered.
    """

    def __init__(self, fd: int, path: str, *, is_ours: bool = False) -> None:
        self.fd = fd
        self.path = path
        self.is_ours = is_ours

    @contextmanager
    def parent(self, path: str) -> Iterator[tuple[int, str]]:
        """The open folder that contains something, and its name there.

        Raises:
            WorkspaceError: a component above it is not a folder, or belongs to another user although all must be this
                user's.
            OSError: it is not there.
        """
        *above, name = path.split("/")
        fd = self.fd
        try:
            for component in above:
                inner = self.enter(fd, component)
                if fd != self.fd:
                    os.close(fd)
                fd = inner
            yield fd, name
        finally:
            if fd != self.fd:
                os.close(fd)

    def enter(self, fd: int, name: str) -> int:
        """Open a folder in an open one; the caller closes it.

        Raises:
            WorkspaceError: it is not a folder, or belongs to another user although all must be this user's.
            OSError: it is not there.
        """
        try:
            inner = os.open(name, _ENTER, dir_fd=fd)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            raise WorkspaceError(f"{name!r} in {self.path} is not a folder: it was replaced") from None
        try:
            status = os.fstat(inner)
            self.check_owner(status, name)
            if self.is_ours and status.st_mode & OTHERS_WRITE:
                os.fchmod(inner, stat.S_IMODE(status.st_mode) & ~OTHERS_WRITE)
        except BaseException:
            os.close(inner)
            raise
        return inner

    def open_file(self, path: str) -> int:
        """Open a regular file for reading.

        Raises:
            WorkspaceError: it is not a regular file.
            OSError: it cannot be opened.
        """
        with self.parent(path) as (fd, name):
            return self.open_in(fd, name)

    def open_in(self, fd: int, name: str) -> int:
        """Open a regular file in an open folder; see `open_file`."""
        try:
            opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise WorkspaceError(f"{name!r} in {self.path} is no longer a file: it was replaced") from None
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            os.close(opened)
            raise WorkspaceError(f"{name!r} in {self.path} is no longer a file: it was replaced")
        return opened

    def create(self, path: str) -> int:
        """Make a file of mode 0600, open for writing and reading."""
        with self.parent(path) as (fd, name):
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd)

    def make_folder(self, path: str) -> None:
        """Make a folder of mode 0700, or keep an existing one; anything else there is removed."""
        with self.parent(path) as (fd, name):
            try:
                os.mkdir(name, 0o700, dir_fd=fd)
            except FileExistsError:
                if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                    return
                os.unlink(name, dir_fd=fd)
                os.mkdir(name, 0o700, dir_fd=fd)

    def link(self, path: str, to: str) -> None:
        """Make a symbolic link, in place of any file or link."""
        with self.parent(path) as (fd, name):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
            os.symlink(to, name, dir_fd=fd)

    def rename(self, path: str, to: str) -> None:
        """Replace another file by a file."""
        with self.parent(path) as (fd, name), self.parent(to) as (new_fd, new_name):
            os.replace(name, new_name, src_dir_fd=fd, dst_dir_fd=new_fd)

    def unlink(self, path: str) -> None:
        """Remove a file or a link."""
        with self.parent(path) as (fd, name):
            os.unlink(name, dir_fd=fd)

    def remove_if_empty(self, path: str) -> None:
        """Remove a folder; it stays if it is not empty."""
        with self.parent(path) as (fd, name), suppress(OSError):
            os.rmdir(name, dir_fd=fd)

    def remove(self, path: str, *, ignore_errors: bool = False) -> None:
        """Remove a folder with its content, or a file or link; no link is followed."""
        with self.parent(path) as (fd, name):
            try:
                is_folder = stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
            except FileNotFoundError:
                return
            if is_folder:
                shutil.rmtree(name, ignore_errors, dir_fd=fd)
            else:
                os.unlink(name, dir_fd=fd)

    def chmod(self, path: str, mode: int) -> None:
        """Set the permissions of a file or a folder.

        Raises:
            WorkspaceError: it is neither, or belongs to another user.
        """
        with self.parent(path) as (fd, name):
            opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
            try:
                status = os.fstat(opened)
                self.check_owner(status, path)
                if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                    raise WorkspaceError(f"{path!r} in {self.path} is neither file nor folder: it has been replaced")
                if stat.S_IMODE(status.st_mode) != mode:
                    os.fchmod(opened, mode)
            finally:
                os.close(opened)

    def check_owner(self, status: os.stat_result, path: str) -> None:
        """Check that something belongs to this user, if everything must.

        Raises:
            WorkspaceError: it does not.
        """
        if self.is_ours and status.st_uid != os.geteuid():
            raise WorkspaceError(
                f"{path!r} in {self.path} belongs to the user {status.st_uid}, not to {os.geteuid()}: remove it there"
            )

    def close(self) -> None:
        """Close the descriptor; another call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_source(path: str) -> Folder:
    """Open a folder to read from, by any path."""
    return Folder(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path)


def open_target(path: str) -> Folder:
    """Open a folder of this user to write to; missing components of its path are made, with mode 0700.

    No other user may influence what it is or contains: it belongs to this user, only this user may write to it, and
    every folder and every link above it belongs to this user or root. Others may write to a folder above it only if
    that is sticky, like ``/tmp``.

    Raises:
        WorkspaceError: that is not so, or the path has too many links.
        OSError: it cannot be made or opened.
    """
    waiting = _names(path)
    fd, links = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), 0
    try:
        while True:
            status = os.fstat(fd)
            if not waiting:
                _check_target(status, path)
                return Folder(os.open(".", _ENTER, dir_fd=fd), path, is_ours=True)
            _check_above(status, path)
            name = waiting.pop()
            inner = _step(fd, name)
            if stat.S_ISLNK(os.fstat(inner).st_mode):
                links += 1
                try:
                    to = _link_of_ours(inner, name, path)
                finally:
                    os.close(inner)
                if links > _MOST_LINKS:
                    _refuse(path, f"there are more than {_MOST_LINKS} links on the way to it")
                waiting += _names(to)
                if not to.startswith("/"):
                    continue
                inner = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            os.close(fd)
            fd = inner
    finally:
        os.close(fd)


def _names(path: str) -> list[str]:
    """The components of a path, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _step(fd: int, name: str) -> int:
    """Open what has this name in a folder, even a link; make a folder if there is nothing."""
    while True:
        with suppress(FileNotFoundError):
            return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        with suppress(FileExistsError):  # another process was faster: the next look shows which
            os.mkdir(name, 0o700, dir_fd=fd)


def _link_of_ours(fd: int, name: str, path: str) -> str:
    owner = os.fstat(fd).st_uid
    if owner not in (0, os.geteuid()):
        _refuse(path, f"the link {name!r} on the way to it belongs to the user {owner}, who may point it anywhere")
    return os.readlink("", dir_fd=fd)


def _check_above(status: os.stat_result, path: str) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"something on the way to {path} is not a folder")
    if status.st_uid not in (0, os.geteuid()):
        _refuse(path, f"a folder above it belongs to the user {status.st_uid}, who may replace it")
    if status.st_mode & OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(status.st_mode)
        _refuse(path, f"others may replace it, since they may write to a folder above it (mode {mode:04o})")


def _check_target(status: os.stat_result, path: str) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{path} is not a folder")
    if status.st_uid != os.geteuid():
        _refuse(path, f"it belongs to the user {status.st_uid}, not to {os.geteuid()}")
    if status.st_mode & OTHERS_WRITE:
        _refuse(path, f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o}): chmod go-w")


def _refuse(path: str, why: str) -> NoReturn:
    raise WorkspaceError(f"{path} cannot be the target of a sync: {why}")
