"""The output of a job's processes in files: a folder for each job, in it a file for each process, of bounded size.

The lines are those of Kubernetes' container logs (CRI), ``TIME stdout F TEXT``, so that other tools read them, too.
``P`` means that the line continues in the next one of its stream. `processes.jsonl` says which process each file
belongs to, `job.json` describes the job. Only this user has access to it: modes 0700 and 0600.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from skipper.control.observe.log_lines import label_of
from skipper.control.observe.log_reader import LogSource
from skipper.control.runtime.join_file import this_network
from skipper.control.support.private_file import make_folder, open_log, open_own, replace
from skipper.control.support.state_folder import make_own_folder, state_folder

FOLDER_VARIABLE = "SKIPPER_LOG_FOLDER"
"""Environment variable that names another folder for the folders of jobs."""

JOB_FILE = "job.json"
PROCESSES_FILE = "processes.jsonl"
SUFFIX = ".log"
OLDER_SUFFIX = ".log.1"

MAX_PROCESS_NBYTES = 64 << 20
"""Bytes that are kept of one process, in two files: the older one is removed when the newer one is full."""
MAX_JOB_NBYTES = 4 << 30
"""Bytes that are kept of all processes: with many processes, each has less."""
MIN_PROCESS_NBYTES = 1 << 20
KEPT_JOBS = 20
"""How many folders of ended jobs are kept; older ones are removed when the next job writes."""
MAX_KEPT_NBYTES = 8 << 30
"""Bytes that are kept of these folders."""

MAX_NAME = 200
"""Length of the name of a file; a file system allows 255."""

_MAX_OPEN = 64
_STREAMS = (b"", b"stdout", b"stderr")

_log = logging.getLogger("skipper.control")


def folders_home() -> Path:
    """The folder with the folders of jobs (see `state_folder`)."""
    return state_folder("logs", FOLDER_VARIABLE)


def start_time_of(pid: int) -> int:
    """When a process of this host was started, in ticks since boot; 0 if there is no such process, or it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *others = file.read().rpartition(b")")[2].split()  # of proc_pid_stat(5)
            return 0 if state in (b"Z", b"X") else int(others[18])  # starttime; an ended one waits for its parent
    except (OSError, ValueError, IndexError):
        return 0


class LogFiles:
    """Writes the output of processes to files; for any thread. Nothing is created before the first output.

    Args:
        folder: for these files; None: a new one, for this job, in `folders_home`.
        job: the id of the job.
        is_stamped: files as above; if False, each stream has its own file, complete, unchanged and without bounds.

    Attributes:
        folder: where they are; None: nowhere yet.
        is_whole: whether they hold all that was written; if False, the oldest output was removed.
    """

    def __init__(self, folder: Path | None, job: str, *, is_stamped: bool = True) -> None:
        self.folder = folder
        self.is_whole = True
        self._job = job
        self._is_stamped = is_stamped
        self._lock = threading.Lock()
        self._is_ready = False
        self._is_over = False
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._sizes: dict[Path, int] = {}
        self._said_of: dict[Path, tuple[str, ...]] = {}

    def path_of(self, source: LogSource) -> Path | None:
        """The file with the output of a process; None if there is none."""
        if self.folder is None or self._is_over:
            return None
        words = (label_of(source.name), source.host, str(source.pid))
        name = re.sub(r"[^A-Za-z0-9._=-]+", "-", "-".join(word for word in words if word))[-MAX_NAME:].lstrip(".")
        if self._is_stamped:
            return self.folder / f"{name}{SUFFIX}"
        return self.folder / f"{name}.{'out' if source.stream == 1 else 'err'}"

    def keep(self, source: LogSource, chunk: bytes) -> None:
        """Write a chunk; a failure is reported once, and nothing is kept from then on."""
        with self._lock:
            if not self._is_over:
                self._keep(source, chunk)

    def close(self) -> None:
        """Close all files. Nothing is kept any more."""
        with self._lock:
            self._close()

    def _keep(self, source: LogSource, chunk: bytes) -> None:
        try:
            self._make_ready()
            path = self.path_of(source)
            assert path is not None  # it has just been made
            if self._is_stamped:
                self._describe(path, source)
                chunk = stamped(chunk, source.stream, time.time())
            self._write(path, chunk)
        except OSError as error:  # for example, the disk is full: output is still shown
            _log.warning("the output of processes is no longer saved in %s: %s", self.folder, error)
            self._close()

    def _close(self) -> None:
        self._is_over = True
        while self._open:
            os.close(self._open.popitem()[1])

    def _make_ready(self) -> None:
        if self._is_ready:
            return
        if self.folder is not None:
            make_folder(self.folder)
        else:
            home = folders_home()
            make_own_folder(home, FOLDER_VARIABLE)
            folder = home / f"{datetime.now().strftime('%Y%m%d-%H%M%S')}-{self._job}"
            folder.mkdir(mode=0o700)
            self.folder = folder
            about = of_process(os.getpid(), self._job, sys.argv[0] if sys.argv else "")
            replace(self.folder / JOB_FILE, json.dumps(about).encode(), 0o600)
            arguments = (home, self.folder.name)
            threading.Thread(target=remove_old, args=arguments, name="control-logs-old", daemon=True).start()
        self._is_ready = True

    def _describe(self, path: Path, source: LogSource) -> None:
        """Note which process the file belongs to, and again when its actors change."""
        if self._said_of.get(path) == source.actors:
            return
        assert self.folder is not None
        self._said_of[path] = source.actors
        about = {"name": source.name, "pid": source.pid, "host": source.host, "actors": source.actors}
        self._append(self.folder / PROCESSES_FILE, json.dumps({"file": path.name, **about}).encode() + b"\n")

    def _write(self, path: Path, content: bytes) -> None:
        size = self._append(path, content)
        most = max(min(MAX_PROCESS_NBYTES, MAX_JOB_NBYTES // len(self._sizes)), MIN_PROCESS_NBYTES)
        if self._is_stamped and size >= most // 2:
            os.close(self._open.pop(path))
            older = path.with_name(path.name.removesuffix(SUFFIX) + OLDER_SUFFIX)
            self.is_whole = self.is_whole and not older.exists()
            path.rename(older)
            self._sizes[path] = 0

    def _append(self, path: Path, content: bytes) -> int:
        """Write; returns the size of the file."""
        if (fd := self._open.pop(path, None)) is None:
            fd = open_log(path)
            if path not in self._sizes:
                self._sizes[path] = os.fstat(fd).st_size
        self._open[path] = fd
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        self._sizes[path] += len(content)
        if len(self._open) > _MAX_OPEN:
            os.close(self._open.popitem(last=False)[1])
        return self._sizes[path]


def stamped(chunk: bytes, stream: int, at_s: float) -> bytes:
    """A chunk as the file has it: each line after its time and stream."""
    moment = datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ").encode()
    head = b"%s %s " % (moment, _STREAMS[stream])
    whole, end, part = chunk.rpartition(b"\n")
    lines = b"%sF %s\n" % (head, whole.replace(b"\n", b"\n%sF " % head)) if end else b""
    return lines + (b"%sP %s\n" % (head, part) if part else b"")


def remove_old(home: Path, current: str, *, most: int | None = None, max_nbytes: int | None = None) -> None:
    """Remove folders of jobs of this host that have ended, beyond those that are kept.

    Args:
        home: where they are.
        current: the name of one that stays.
        most: how many stay; None: `KEPT_JOBS`.
        max_nbytes: size of these; None: `MAX_KEPT_NBYTES`.
    """
    most = KEPT_JOBS if most is None else most
    left, kept = MAX_KEPT_NBYTES if max_nbytes is None else max_nbytes, 0
    for folder in jobs_with_files(home):
        if folder.name == current or is_running(about_job(folder)):
            continue
        with contextlib.suppress(OSError):  # another job removes it
            left -= sum(entry.stat().st_size for entry in os.scandir(folder))
        kept += 1
        if kept > most or left < 0:
            shutil.rmtree(folder, ignore_errors=True)


def _folders_of_jobs(home: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(home):
            if entry.is_dir(follow_symlinks=False) and os.path.exists(os.path.join(entry.path, JOB_FILE)):
                yield Path(entry.path)


def jobs_with_files(home: Path) -> list[Path]:
    """The folders of jobs, first those that began last."""
    return sorted(_folders_of_jobs(home), key=_beginning, reverse=True)


def _beginning(folder: Path) -> tuple[float, str]:
    """When its job began. The name does not say it: that is in seconds of local time, which is set back in autumn."""
    began_s = about_job(folder).get("began_s")
    return began_s if isinstance(began_s, float) and began_s >= 0 else 0.0, folder.name


def about_job(folder: Path) -> dict[str, object]:
    """What a folder of this user says about its job; empty if it says nothing."""
    try:
        with os.fdopen(open_own(folder / JOB_FILE), "rb") as file:
            about = json.loads(file.read(64 << 10))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def is_running(about: dict[str, object]) -> bool:
    """Whether the script of a job may still run; that of a job on another host always may."""
    if not about:
        return False
    if about.get("network") != this_network():
        return (
            about.get("hostname") != socket.gethostname()
        )  # otherwise it belongs to an earlier boot, or to a container that has ended
    pid, start = about.get("pid"), about.get("start")
    return isinstance(pid, int) and start_time_of(pid) == start != 0


def of_process(pid: int, job: str, script: str) -> dict[str, object]:
    """The description of a job for its folder.

    Args:
        pid: process id of its script, on this host.
        job: its id.
        script: the script's path, if it has one.
    """
    return {
        "version": 1,
        "job": job,
        "script": os.path.abspath(script) if script not in ("", "-c") else "",
        "pid": pid,
        "start": start_time_of(pid),
        "hostname": socket.gethostname(),
        "network": this_network(),
        "began_s": time.time(),
    }
