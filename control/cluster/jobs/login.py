"""`LoginJob`: machines with logins, by ``ssh`` or another command that gives a shell there; no engine is needed."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from skipper.control.cluster.jobs.engine import Place, PlaceState
from skipper.control.cluster.jobs.folder import JobFolder, read_log, start_into
from skipper.control.cluster.jobs.job import Job
from skipper.control.cluster.jobs.local import PlaceProcess, ProcessEngine
from skipper.control.model.errors import JobError
from skipper.control.wire import addresses

SSH = ("ssh", "-o", "BatchMode=yes", "-T")
"""Does not ask for a password, and opens no terminal there."""

_SERVING = re.compile(r"^serving at (tcp://\S+)\s*$", re.MULTILINE)


class LoginJob(Job):
    """One agent on each of some machines, started by a login there. Elastic: a lost one is started again where it was.

    A login ends with this process, in any way that it ends, and with the login its agent, which ends with its standard
    input. The secret of the agents is sent over the login, too; it is on no command line and in no file there.

    Args:
        hosts: the machines, as ``login`` takes them; the part after an ``@`` is a name or an IP at which this machine
            and the others reach them.
        login: the command that runs a line in a shell on a machine; the machine and the line are added to it.
        python: the Python interpreter there, which has this library.
        setup: lines that the shell runs first, such as ``cd`` and ``export``.
        port: the port that agents listen on; 0: any free port.
        certs: the folder of certificates for TLS, on each machine (see `attach_to_hosts`).
        insecure: use no TLS to other machines.
        address: as for `Job`.
        data_plane: as for `Job`.
        folder: the folder to keep logs in; None: they are deleted with the job.

    Raises:
        ValueError: there are no machines, one is named twice, or a name cannot be resolved.

    Example:
        ```python
        import sys

        from skipper.control.cluster.jobs import LoginJob

        shell = ["sh", "-c", 'exec sh -c "$1"']  # here a shell of this machine; the default is ssh
        with LoginJob(["127.0.0.1"], login=shell, python=sys.executable) as job:
            print(job.hosts().extent)  # {'hosts': 1}
        ```
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        login: Sequence[str] = SSH,
        python: str = "python3",
        setup: Sequence[str] = (),
        port: int = 0,
        certs: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        address: str | None = None,
        data_plane: bool | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(hosts, str):
            raise ValueError(f"hosts are a list of names, not the text {hosts!r}")
        if len(set(hosts)) != len(hosts):
            raise ValueError("a machine is listed twice")
        lines = [_line(host, python, setup, port, certs, insecure=insecure) for host in hosts]
        engine = LoginEngine(
            [(host, [*login, host, line]) for host, line in zip(hosts, lines, strict=True)],
            JobFolder(folder),
            None if certs is None else Path(certs),
        )
        super().__init__(engine, len(hosts), insecure=insecure, address=address, data_plane=data_plane)


def _line(
    host: str, python: str, setup: Sequence[str], port: int, certs: str | os.PathLike[str] | None, *, insecure: bool
) -> str:
    """The line for the shell of a machine."""
    ip, _ = addresses.parse(addresses.SCHEME + addresses.at(host.rpartition("@")[2], port))
    words = ["-m", "skipper.control.cluster.hosts", "serve", "--address", addresses.SCHEME + addresses.at(ip, port)]
    words += ["--secret-stdin", "--until-eof"]
    words += [] if certs is None else ["--certs", os.fspath(certs)]
    words += ["--insecure"] if insecure else []
    return "\n".join((*setup, f"exec {python} {shlex.join(words)}"))


class LoginEngine(ProcessEngine):
    """Logins as places. ``commands``: each machine's name, and the command that logs in and starts the agent."""

    kind = "the login"

    def __init__(self, commands: Sequence[tuple[str, Sequence[str]]], folder: JobFolder, certs: Path | None) -> None:
        super().__init__(folder, certs)
        self._commands = commands

    def start(self, rank: int, name: str, log: Path) -> subprocess.Popen[bytes]:
        """See `ProcessEngine`."""
        machine, command = self._commands[rank]
        try:
            popen = start_into(log, command)
        except OSError as error:
            raise JobError(f"the command that logs in to {machine} cannot be run: {error}") from error
        assert popen.stdin is not None  # asked for
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `poll` reports
            popen.stdin.write(self.secret_file.read_bytes())
            popen.stdin.flush()
        return popen

    def place_of(self, child: PlaceProcess) -> Place:
        """See `ProcessEngine`."""
        machine, _ = self._commands[child.rank]
        said = _SERVING.search(read_log(child.log))
        if said is None:
            return Place(PlaceState.PENDING, name=machine, reason="its agent does not listen yet")
        return Place(PlaceState.RUNNING, said[1], machine)
