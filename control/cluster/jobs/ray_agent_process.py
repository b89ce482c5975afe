"""`AgentProcess`: the agent of one place of a job on a node of a Ray cluster, as a child process of a Ray actor.

`ray_driver` makes the actor from it. The child process runs ``ray_agent_process.py FOLDER HOST OPTIONS``: the folder
contains the credentials of scripts and agents, and is removed when that process ends, however it ends. The options are
those of ``skipper host serve``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_LOG_NBYTES = 1 << 20
"""How much of an agent's output is kept: the end."""

_MOST_AT_ONCE = 1 << 16
_SERVING = b"serving at "


class AgentProcess:
    """The agent of one place.

    Args:
        host: the IP that it listens on, with a port that the system picks.
        files: the credentials of scripts and agents: ``secret``, and for TLS the authority of the job.
        options: further arguments of ``skipper host serve``.
        env: environment variables for the agent, besides those of this process; None: without.
    """

    def __init__(
        self, host: str, files: Mapping[str, bytes], options: Sequence[str], env: Mapping[str, str | None]
    ) -> None:
        self._lock = threading.Lock()
        self._tail = bytearray()
        self._written = 0
        self._address: str | None = None
        variables = {**os.environ, **env}
        folder = _folder_with(files)
        try:
            self._agent = subprocess.Popen(
                [sys.executable, __file__, str(folder), host, *options],
                stdin=subprocess.PIPE,  # it closes with this process, however that ends
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in variables.items() if value is not None},
            )
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        threading.Thread(target=self._read, name="skipper-agent-output", daemon=True).start()

    def report(self, since: int) -> dict[str, Any]:
        """The state of the agent, as a dict.

        Args:
            since: how many bytes of its output the caller has already.

        Returns:
            ``address``: where it listens; None before it does. ``status``: its exit status, as
            `subprocess.Popen.returncode`; None while it runs. ``written``: how many bytes it has written so far.
            ``output``: what it has written after ``since``, or as much of that as is kept.
        """
        status = self._agent.poll()
        with self._lock:
            missing = min(self._written - since, len(self._tail))
            output = bytes(self._tail[len(self._tail) - missing :]) if missing > 0 else b""
            return {"address": self._address, "status": status, "written": self._written, "output": output}

    def _read(self) -> None:
        line = b""  # the line that is being written, until the address is known
        assert self._agent.stdout is not None  # it was asked for
        with self._agent.stdout as output:
            while content := os.read(output.fileno(), _MOST_AT_ONCE):
                *lines, line = (line + content).split(b"\n") if self._address is None else (b"",)
                with self._lock:
                    self._tail += content
                    self._written += len(content)
                    del self._tail[:-MOST_LOG_NBYTES]
                    for said in lines:
                        if said.startswith(_SERVING):
                            self._address = said.removeprefix(_SERVING).decode().strip()


def _folder_with(files: Mapping[str, bytes]) -> Path:
    """A new folder with files that no other user can read."""
    folder = Path(tempfile.mkdtemp(prefix="skipper-agent-"))
    for name, content in files.items():
        fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
    return folder


class NodeAgentProcess(AgentProcess):
    """An agent at the IP of its Ray node; see `AgentProcess`."""

    def __init__(self, files: Mapping[str, bytes], options: Sequence[str], env: Mapping[str, str]) -> None:
        import ray

        debugger = os.environ.get("PYTHONBREAKPOINT", "")
        theirs = (
            {"PYTHONBREAKPOINT": None} if debugger.startswith("ray.") else {}
        )  # in an agent, breakpoint() is Skipper's
        super().__init__(ray.util.get_node_ip_address(), files, options, {**theirs, **env})


def main(folder: str, host: str, options: list[str]) -> int:
    """Serve until standard input ends; returns the exit status."""
    _remove_afterwards(folder)  # before there are threads, which a fork would lose
    from skipper.control.cluster.hosts import command
    from skipper.control.wire import addresses
    from skipper.control.wire.certificates import AUTHORITY, SECRET

    options = ["--address", f"tcp://{addresses.at(host, 0)}", "--until-eof", *options]
    options += ["--secret-file", os.path.join(folder, SECRET)]
    if os.path.exists(os.path.join(folder, AUTHORITY)):
        from skipper.control.cluster.hosts.certs import issue

        options += ["--certs", str(issue(folder, os.path.join(folder, "certs"), [host], role="host"))]
    return command.main(["serve", *options])


def _remove_afterwards(folder: str) -> None:
    """Start a process that waits for the end of this one and then removes the folder: Ray kills its actors' children.

    It is not a child of the actor, so that Ray does not kill it, too.
    """
    ours, mine = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.close(mine)
        for fd in (0, 1, 2):
            os.close(fd)
        os.read(ours, 1)  # returns when the process with the other end ends
        os.execvp("rm", ["rm", "-rf", "--", folder])
    os.close(ours)


if __name__ == "__main__":
    # As in `control.runtime.procs.worker`: its folder, where `ray` is another module, gives its place to the package's.
    sys.path[0] = os.path.abspath(os.path.join(__file__, *[os.pardir] * 5))
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
