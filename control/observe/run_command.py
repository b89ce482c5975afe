"""``skipper run``: runs a script as ``python`` does, under a name, and keeps a record of it."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from skipper.commandline import FAILED, BadArgumentsError, CommandParser, seconds
from skipper.commandline import run as run_command
from skipper.control.model.errors import ControlError
from skipper.control.observe.log_files import of_process
from skipper.control.observe.record import RECORD_VARIABLE, RecordWriter, name_for, new_folder
from skipper.control.runtime import join_file

INTERVAL_S = 1.0
STACKS_S = 10.0

_FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
_AWAITED = _FORWARDED | {signal.SIGCHLD}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MOST_ARGUMENTS = 16 << 10

_LOGS_VARIABLE = "SKIPPER_LOGS"
_SERVE_VARIABLE = "SKIPPER_SERVE"


def parser(prog: str) -> CommandParser:
    """The parser of the command."""
    own = CommandParser(
        prog=prog,
        description="Run a script as python does, and keep a record of its job: its status every second, deaths, "
        "errors with tracebacks, stacks, syncs of weights. The record remains when the script has ended, also after "
        "a crash; skipper record shows it.",
        exit_codes={
            FAILED: "the script could not be run; otherwise the exit code is the script's, or 128 plus the number "
            "of the signal"
        },
    )
    own.add_argument("-n", "--name", metavar="NAME", help="name of the run and of its job (default: the script's)")
    own.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as for python -m")
    own.add_argument(
        "--logs", choices=("labelled", "raw", "off"), help="how to show the output of actors (default: labelled)"
    )
    own.add_argument(
        "--folder", type=Path, metavar="DIR", help="folder for the record, which must be empty (default: a new one)"
    )
    own.add_argument(
        "--interval",
        type=seconds,
        default=INTERVAL_S,
        metavar="S",
        help=f"seconds between updates (default: {INTERVAL_S:g})",
    )
    own.add_argument(
        "--stacks",
        type=seconds,
        default=STACKS_S,
        metavar="S",
        help=f"seconds between recordings of all stacks (default: {STACKS_S:g})",
    )
    own.add_argument("script", metavar="SCRIPT", help="the script, or with -m the module")
    rest = own.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="arguments of the script")
    rest.required = False  # otherwise argparse also names it if the script is missing
    return own


def main(argv: Sequence[str], *, prog: str = "skipper run") -> int:
    """Run a script and record it; returns the script's exit code."""
    return run_command(parser(prog), argv, _run, errors=(ControlError, OSError), status=FAILED)


def _run(given: argparse.Namespace) -> int:
    command = _command(given)
    name = _free_name(given.name, given.script)
    folder = new_folder(name, given.folder)
    environment = {**os.environ, RECORD_VARIABLE: str(folder), _SERVE_VARIABLE: name}
    if given.logs is not None:
        environment[_LOGS_VARIABLE] = given.logs
    about: dict[str, object] = {
        "name": name,
        "command": _cut(command),
        "cwd": os.getcwd(),
        "recorder": os.getpid(),
        "interval_s": given.interval,
    }
    record = RecordWriter(folder)
    if not record.describe({**of_process(os.getpid(), "", given.script), **about}):
        raise OSError(f"the record cannot be written to {folder}")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    try:
        script = _started(command, environment, before)
        about = {**of_process(script.pid, "", given.script), **about}
        record.describe(about)
        record.event("begin", name, " ".join(_cut(command)), pid=script.pid)
        status = _recorded(script, record, name, given)
        outcome = _outcome(status)
        record.event("end", name, outcome)
        record.describe({**about, "ended_s": time.time(), "status": status, "outcome": outcome})
    finally:
        while signal.sigtimedwait(_AWAITED, 0) is not None:  # a second Ctrl-C, which the script got, too
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    problem = record.problem
    record.close()
    if status != 0 or problem:
        missing = f"; parts of it are missing: {problem}" if problem else ""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"skipper run: {name} {outcome}; its record: skipper record show {folder}{missing}\n")
    return status if status >= 0 else 128 - status


def _command(given: argparse.Namespace) -> list[str]:
    """The command to run.

    Raises:
        BadArgumentsError: there is no such script.
    """
    if not given.module and not Path(given.script).exists():
        raise BadArgumentsError(f"there is no script {given.script}")
    if given.module and importlib.util.find_spec(given.script.partition(".")[0]) is None:
        sys.path.insert(0, os.getcwd())  # python -m looks there, too
        if importlib.util.find_spec(given.script.partition(".")[0]) is None:
            raise BadArgumentsError(f"there is no module {given.script}")
    return [sys.executable, *(["-m"] if given.module else []), given.script, *given.arguments]


def _free_name(name: str | None, script: str) -> str:
    """The name of the run. If the user chose none and a running job has the default one, another is used.

    Raises:
        BadArgumentsError: it is not valid, or a running job has it.
    """
    running = join_file.running()
    if name is None:
        own = name_for(script)
        return own if own not in running else f"{own}-{os.getpid()}"
    try:
        join_file.path_of(name)
    except ValueError as error:
        raise BadArgumentsError(str(error)) from None
    if name in running:
        raise BadArgumentsError(f"another running job is already called {name!r}")
    return name


def _started(
    command: Sequence[str], environment: dict[str, str], mask: set[signal.Signals | int]
) -> subprocess.Popen[bytes]:
    """The script, which ends with this process: it gets SIGTERM if this one is killed.

    Raises:
        OSError: it cannot be started.
    """
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # it was killed earlier
            os._exit(1)

    return subprocess.Popen(command, env=environment, preexec_fn=prepare)  # this thread is the only one


def _recorded(script: subprocess.Popen[bytes], record: RecordWriter, name: str, given: argparse.Namespace) -> int:
    """Record the script until it ends; returns its status as `subprocess` gives it."""
    from skipper.control.observe.recorder import JobRecorder  # while the script imports what it needs

    recorder = JobRecorder(record, name, interval_s=given.interval, stacks_s=given.stacks)
    recorder.start()
    while (status := script.poll()) is None:
        came = signal.sigwaitinfo(_AWAITED)
        # The script also gets signals of the terminal, and those that it sends to its whole process group itself.
        if came.si_signo in _FORWARDED and came.si_code <= 0 and came.si_pid != script.pid:
            script.send_signal(came.si_signo)
    recorder.close()
    join_file.remove_if_stale(join_file.path_of(name))
    return status


def _outcome(status: int) -> str:
    if status == 0:
        return "ended well"
    if status > 0:
        return f"exited with code {status}"
    try:
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"was killed by signal {-status}"


def _cut(words: Sequence[str]) -> list[str]:
    """The command; only the beginning of a long one."""
    kept, left = [], _MOST_ARGUMENTS
    for word in words:
        if left <= 0:
            break
        kept.append(word[:left])
        left -= len(word)
    return kept
