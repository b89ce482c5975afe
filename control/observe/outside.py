"""The stacks of a process that cannot be asked, as seen from another process of the same host and user.

`py-spy` reads them out of its memory, if it is installed and the kernel lets it. Otherwise the process is sent a signal
whose handler writes them (see `control.runtime.procs.stack_file`); a stopped process does not get it before it goes on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from skipper.control.runtime.procs.stack_file import NAME, SIGNAL

PY_SPY_TIMEOUT_S = 10.0
SIGNAL_TIMEOUT_S = 2.0
LONGEST_S = PY_SPY_TIMEOUT_S + SIGNAL_TIMEOUT_S
"""How long a look may take."""
_QUIET_S = 0.05
"""The stacks are whole once nothing has been added for this long."""

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in an uninterruptible wait of the kernel",
    "T": "stopped by a signal",
    "t": "stopped by a tracer",
    "Z": "dead, and not reaped",
    "X": "dead",
}


def look(pid: int, *, native: bool = False) -> str:
    """The state and the stacks of a process, as text; why there are none where that is so.

    Args:
        pid: on this host.
        native: have `py-spy` show frames of C and C++ code, too.
    """
    state = _state(pid)
    if state is None:
        return f"there is no process {pid}"
    head = f"it is {_STATES.get(state, state)}"
    if state in "ZX":
        return head
    spied, why = _py_spy(pid, stopped=state in "Tt", native=native)
    if spied is not None:
        return f"{head}\n{spied}"
    written, why_not = _have_it_written(pid, state)
    if written is not None:
        return f"{head}; {why}, so it wrote this itself\n{written}"
    return f"{head}; {why}; {why_not}"


def py_spy() -> str | None:
    """Path of the `py-spy` program: that of this environment, or else the first on the path."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _py_spy(pid: int, *, stopped: bool, native: bool) -> tuple[str | None, str]:
    program = py_spy()
    if program is None:
        return None, "py-spy is not installed"
    command = [program, "dump", "--pid", str(pid)]
    if stopped:
        command.append("--nonblocking")  # it would wait for a stop that has been
    elif native:
        command.append("--native")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PY_SPY_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"py-spy took more than {PY_SPY_TIMEOUT_S:g} s"
    except OSError as error:
        return None, f"py-spy cannot be run ({error.strerror})"
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return None, f"py-spy failed ({said[-1].strip() if said else f'exit code {done.returncode}'})"
    return done.stdout.strip(), ""


def _have_it_written(pid: int, state: str) -> tuple[str | None, str]:
    if state in "Tt":
        return None, "it handles no signal while it is stopped"
    if not _catches(pid, SIGNAL):
        return None, "it has not been prepared to write its stacks"
    path = _stack_file(pid)
    if path is None:
        return None, "the file that it would write into is not accessible"
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            file.seek(0, os.SEEK_END)
            os.kill(pid, SIGNAL)
            text, deadline, heard = "", time.monotonic() + SIGNAL_TIMEOUT_S, 0.0
            while (now := time.monotonic()) < deadline and not (text and now - heard > _QUIET_S):
                more = file.read()
                if more:
                    text, heard = text + more, now
                time.sleep(0.005)
    except OSError as error:
        return None, f"it cannot be sent a signal ({error.strerror})"
    return (text.strip(), "") if text else (None, f"it did not handle a signal within {SIGNAL_TIMEOUT_S:g} s")


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def _catches(pid: int, number: int) -> bool:
    """Whether the process handles this signal: it would end it otherwise."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _stack_file(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{number}"
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith(f"/memfd:{NAME}"):
                    return path
    return None


def descendants(pid: int) -> list[int]:
    """A process and all below it, parents first."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            stat = Path(f"/proc/{name}/stat").read_text(encoding="utf-8", errors="replace")
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(name))
    found = [pid]
    for parent in found:
        found.extend(sorted(children.get(parent, ())))
    return found


def command_line(pid: int) -> str:
    """What a process was started as, in one line."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    return " ".join(word for word in words if word)[:160]
