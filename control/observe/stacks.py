"""`job_stacks`: where every thread of a running job is, also in processes that hang.

A process that answers lists its own stacks. Another process of the same host and user inspects one that
cannot: `py-spy` reads its memory, if it is installed and the kernel permits it. Otherwise the process writes its stacks
itself (see `control.observe.written_stacks`), which a stopped one cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import linecache
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from skipper.control.api.join import find_for_tools, visiting
from skipper.control.model.errors import DeadlineError, JobNotFoundError
from skipper.control.observe.job_query import ProcessAnswer, survey
from skipper.control.observe.written_stacks import have_written
from skipper.control.runtime.procs.stack_file import frames_of_threads
from skipper.control.wire.addresses import within_host
from skipper.control.wire.vitals import look_at

if TYPE_CHECKING:
    from skipper.control.runtime.actor_state import ActorState
    from skipper.control.runtime.process import Process


_RUNTIME_THREADS = ("control-", "dataplane-")
"""How the names of this library's own threads begin."""

_WAITS = "control/model/future.py"
"""Frames below `Future.get` there only show that it waits."""

_MACHINERY = (
    *(f"control/runtime/{name}.py" for name in ("procs/worker", "executor", "actor_state", "procs/fork_server")),
    *(f"lib/python{sys.version_info.major}.{sys.version_info.minor}/threading.py", "<frozen runpy>"),
)

_UNIX = "unix-abstract:"
_LOOKS_AT_ONCE = 4
_KNOCK_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stack: the line of code that runs or waits.

    The example of `ProcessStacks` shows one.
    """

    file: str
    line: int
    function: str
    code: str


@dataclass(frozen=True, slots=True)
class ThreadStacks:
    """The stack of a thread, or of a task of an event loop.

    The example of `ProcessStacks` shows one.

    Attributes:
        name: name of the thread or task.
        actor: its actor, with the rank; empty for other threads.
        doing: the endpoint that the actor is running, and for how long, as text.
        frames: the frames, innermost first.
    """

    name: str
    actor: str
    doing: str
    frames: Sequence[Frame]

    @property
    def users_frames(self) -> Sequence[Frame]:
        """The frames without those of this library and of `threading` around them, down to the call of `Future.get`."""
        if self.name.startswith(_RUNTIME_THREADS):
            return ()
        kept = len(self.frames)
        while kept and self.frames[kept - 1].file.endswith(_MACHINERY):
            kept -= 1
        waits = itertools.takewhile(lambda frame: frame.file.endswith(_WAITS), self.frames[:kept])
        return self.frames[max(len(list(waits)) - 1, 0) : kept]


@dataclass(frozen=True, slots=True)
class ProcessStacks:
    """The stacks of a process.

    Attributes:
        name: name of the process.
        pid: process id on its host; None if it is not known.
        labels: its actors, as ``name{rank}`` and as ``name:number of the rank``.
        threads: stacks that the process reports; empty if it did not answer.
        problem: why it did not answer; empty if it did.
        text: stacks that were read from outside, if that was tried.

    Example:
        ```python
        from skipper.control import this_host
        from skipper.control.observe import Frame, ProcessStacks, ThreadStacks, job_stacks

        this_host().spawn_procs({"gpus": 1}, name="workers").initialized.get(timeout=60)
        process: ProcessStacks
        for process in job_stacks():
            thread: ThreadStacks = process.threads[0]
            frame: Frame = thread.frames[0]
            print(f"{process.name}: {thread.name} is at {frame.file}:{frame.line}")
        ```
    """

    name: str
    pid: int | None
    labels: Sequence[str]
    threads: Sequence[ThreadStacks]
    problem: str = ""
    text: str = ""

    def is_meant_by(self, word: str) -> bool:
        """Whether a word selects it: its pid, its name or that of one of its actors, or the beginning of one."""
        if word.isdecimal():
            return self.pid == int(word)
        if self.problem and word in self.name:  # this may be its command line, if its name is not known
            return True
        return any(label == word or label.startswith(f"{word}{{") for label in (self.name, *self.labels))


def job_stacks(
    address: str | os.PathLike[str] | None = None, *, native: bool = False, timeout: float = 5.0
) -> list[ProcessStacks]:
    """The stacks of all processes of a running job (see `job_status`), the script first.

    A process that answers reports its own stacks. One that does not, because it is stopped or holds the interpreter
    lock, is inspected from outside by the process that launched it; if the script does not answer, this process
    inspects it and everything below it.

    Args:
        address: as for `job_status`.
        native: inspect all of them with `py-spy`, and show frames of C and C++ code.
        timeout: seconds after which a process that does not answer is inspected from outside.

    Raises:
        JoinError: as `join` says.
        SupervisionError: the script is gone.
    """
    try:
        with visiting(address, timeout=timeout) as process:
            return _surveyed(process, native=native, timeout=timeout)
    except DeadlineError:
        return _seen_from_here(find_for_tools(address).root.id, native=native)


def stacks_around(process: Process, *, timeout: float) -> list[ProcessStacks]:
    """The same as `job_stacks`, for a process of the job or one that visits it.

    Raises:
        ControlError: the script is gone, or it does not answer and cannot be inspected from here.
    """
    try:
        return _surveyed(process, native=False, timeout=timeout)
    except DeadlineError:
        return _seen_from_here(process.root.id, native=False)


def _surveyed(process: Process, *, native: bool, timeout: float) -> list[ProcessStacks]:
    # A parent needs time to inspect a child, in addition to the time that the child had for its answer.
    return [_stacks_of(answer) for answer in survey(process, "stacks", native, timeout=timeout, margin=LONGEST_S)]


def answer(process: Process, argument: bool) -> tuple[list[str], list[ThreadStacks], str]:
    """The stacks of this process: labels of its actors, its threads, and py-spy's output if requested."""
    actors = [*process.actors.live(), *process.actors.ending()]
    of_thread = {actor.executor.thread_id: actor for actor in actors if actor.executor is not None}
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found: list[ThreadStacks] = []
    for ident, frame in frames_of_threads().items():
        if ident == threading.get_ident():
            continue
        walked = []
        inner: Any = frame
        while inner is not None:
            walked.append(_frame(inner.f_code, inner.f_lineno))
            inner = inner.f_back
        actor = of_thread.get(ident)
        found.append(ThreadStacks(names.get(ident, f"thread {ident}"), *_whose(actor), walked))
        if actor is not None and actor.executor is not None and actor.executor.event_loop is not None:
            found += _tasks(actor, actor.executor.event_loop)
    labels = [
        label for actor in actors for label in (f"{actor.name}{dict(actor.rank)}", f"{actor.name}:{actor.rank.rank}")
    ]
    labels += [actor.name for actor in actors]
    return labels, found, look(os.getpid(), native=True) if argument else ""


def answer_for(pid: int, argument: bool) -> str:
    """The stacks of a child that has not answered."""
    return look(pid, native=argument)


def _whose(actor: ActorState | None) -> tuple[str, str]:
    if actor is None:
        return "", ""
    doing = ", ".join(f"{endpoint} for {for_s:.1f} s" for endpoint, for_s in actor.progress.handling())
    return str(actor.ref), doing


def _tasks(actor: ActorState, loop: asyncio.AbstractEventLoop) -> list[ThreadStacks]:
    """Where the coroutines of an async actor wait."""
    found = []
    for task in asyncio.all_tasks(loop):
        frames = []
        coroutine: Any = task.get_coro()
        while coroutine is not None and getattr(coroutine, "cr_frame", None) is not None:
            frames.append(_frame(coroutine.cr_frame.f_code, coroutine.cr_frame.f_lineno))
            coroutine = coroutine.cr_await
        found.append(ThreadStacks(f"task {task.get_name()}", *_whose(actor), frames[::-1]))
    return found


def _frame(code: CodeType, line: int | None) -> Frame:
    number = line or 0
    return Frame(code.co_filename, number, code.co_qualname, linecache.getline(code.co_filename, number).strip())


def _stacks_of(answer: ProcessAnswer) -> ProcessStacks:
    said = answer.value()
    if said is None:
        text = answer.value_from_outside() or ""
        return ProcessStacks(answer.process.name, answer.pid, (), (), answer.problem, text)
    labels, threads, text = said
    return ProcessStacks(answer.process.name, answer.pid, labels, threads, "", text)


def _seen_from_here(script_id: str, *, native: bool) -> list[ProcessStacks]:
    """The script, which does not answer, and everything below it, from outside."""
    pids = descendants(_pid_of(script_id))
    with ThreadPoolExecutor(_LOOKS_AT_ONCE) as pool:
        texts = pool.map(lambda pid: look(pid, native=native), pids)
    return [
        ProcessStacks(command_line(pid), pid, (), (), "the script does not answer", text)
        for pid, text in zip(pids, texts, strict=True)
    ]


def _pid_of(process_id: str) -> int:
    """The process of this host that listens at the address that only that process can have.

    Raises:
        DeadlineError: it is frozen, and its queue of connections is full.
        JobNotFoundError: it has ended.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        knock.settimeout(_KNOCK_TIMEOUT_S)
        try:
            knock.connect("\0" + within_host(process_id).removeprefix(_UNIX))
        except (BlockingIOError, TimeoutError):  # unix(7): its queue of connections is full
            raise DeadlineError(
                "the script is frozen, and its queue of connections is full: continue it (kill -CONT), or look at it "
                "from outside with py-spy dump --pid PID"
            ) from None
        except ConnectionRefusedError:
            raise JobNotFoundError("the script has ended in the meantime") from None
        pid, _, _ = struct.unpack("iii", knock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


PY_SPY_TIMEOUT_S = 8.0
LONGEST_S = 12.0
"""How long an inspection may take; in the time that py-spy leaves, the process can write its stacks itself."""

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
    """The state and the stacks of a process of this host, as text, or why there are none; ``native``: with C frames."""
    state = look_at(pid).state
    if not state:
        return f"there is no process {pid}"
    head = f"it is {_STATES.get(state, state)}"
    if state in "ZX":
        return head
    end = time.monotonic() + LONGEST_S
    spied, why = _py_spy(pid, stopped=state in "Tt", native=native)
    if spied is not None:
        return f"{head}\n{spied}"
    written = have_written(pid, state, end=end)
    if written.text is not None:
        return f"{head}; {why}, so it wrote this itself{written.how}\n{written.text}"
    return f"{head}; {why}; {written.how}"


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
        command.append("--nonblocking")  # it would wait for a stop that is over
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
    """The command line of a process, in one line."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    return " ".join(word for word in words if word)[:160]
