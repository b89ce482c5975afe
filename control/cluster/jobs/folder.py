"""`JobFolder`: a folder that only the script and the places of its job can read."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from skipper.control.cluster.hosts import protocol
from skipper.control.cluster.jobs.engine import Place, PlaceState
from skipper.control.model.errors import HostError, JobError
from skipper.control.support.private_file import make_folder, open_log

_SECRET = "secret"
_ANNOUNCEMENTS = "agents"
_LOGS = "logs"


class JobFolder:
    """A new folder of one job, of mode 0700: the agents' secret, what agents announce, and what they write.

    Other users can read command lines and environments, so both sides find the secret in a file. A process that can
    read this folder can control the agents of the job.

    Args:
        parent: where it is made; on a file system that all places share, if they are other machines. None: a temporary
            folder of this machine, which is removed with its content when the job ends. Otherwise the logs stay.
    """

    def __init__(self, parent: str | os.PathLike[str] | None = None) -> None:
        self._parent = parent
        self._path: Path | None = None

    @property
    def path(self) -> Path:
        """The folder, made at the first access.

        Raises:
            JobError: it cannot be made.
        """
        if self._path is None:
            try:
                self._path = self._make()
            except OSError as error:
                where = self._parent or tempfile.gettempdir()
                raise JobError(f"cannot make the folder of the job in {where}: {error}") from error
        return self._path

    def _make(self) -> Path:
        if self._parent is not None:
            make_folder(Path(self._parent))
        path = Path(tempfile.mkdtemp(prefix="skipper-job-", dir=self._parent)).absolute()
        for name in (_ANNOUNCEMENTS, _LOGS):
            (path / name).mkdir(mode=0o700)
        fd = os.open(path / _SECRET, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
        return path

    @property
    def secret_file(self) -> Path:
        """The agents' secret, made only for this job."""
        return self.path / _SECRET

    @property
    def logs(self) -> Path:
        """The folder of the agents' output."""
        return self.path / _LOGS

    def announcement(self, name: str) -> Path:
        """The file where an agent writes its address."""
        return self.path / _ANNOUNCEMENTS / name

    def close(self) -> None:
        """Remove the secret, and everything except logs that stay; idempotent."""
        if self._path is None:
            return
        if self._parent is None:
            shutil.rmtree(self._path, ignore_errors=True)
            return
        for entry in self._path.iterdir():
            if entry.is_dir() and entry.name != _LOGS:
                shutil.rmtree(entry, ignore_errors=True)
            elif not entry.is_dir():
                entry.unlink(missing_ok=True)


def start_into(log: Path, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a program whose output goes to a log, and whose input is a pipe from this process.

    Raises:
        OSError: it cannot be started, or the log cannot be made.
    """
    with os.fdopen(open_log(log), "ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the script, which then ends them
        )


def read_log(*paths: Path) -> str:
    """The present content of logs, concatenated; a missing one is empty."""
    texts = []
    for path in paths:
        with contextlib.suppress(OSError):
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return "".join(texts)


def place_behind(path: Path, name: str) -> Place:
    """The place of a running agent, by its announcement."""
    try:
        address = protocol.announced(path)
    except HostError as error:
        return Place(PlaceState.FAILED, name=name, reason=str(error))
    if address is None:
        return Place(PlaceState.PENDING, name=name, reason="its agent does not listen yet")
    return Place(PlaceState.RUNNING, address, name)
