"""Breakpoints in actors: each parks the thread that reached it, which then takes pdb's commands from other processes.

Only that thread waits. Its process answers heartbeats, and other actors run. Every command of a debugger is a survey,
so nothing is lost when the debugger goes away: a parked thread stays parked until somebody lets it continue, or until
the actor fails or its process ends.
"""

from __future__ import annotations

import dis
import io
import itertools
import linecache
import os
import pdb
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from skipper.control.api.join import serve_job, visiting
from skipper.control.model.errors import ControlError
from skipper.control.model.future import Promise
from skipper.control.observe.job_query import survey
from skipper.control.runtime import current_runtime, join_file
from skipper.control.runtime.context import current_context, local_actor
from skipper.control.runtime.requests import Request

if TYPE_CHECKING:
    from skipper.control.runtime.process import Process


MAX_OUTPUT_CHARS = 100_000
"""How much of a command's output is kept: its end."""

SERVE: Request[None, str] = Request("serve", "does not allow tools to connect")
"""Let tools into the job, for a user who will need them; the answer is the name of the job."""

_SERVE_TIMEOUT_S = 5.0
_RUNTIME = "skipper.control.runtime."
_YIELD = dis.opmap["YIELD_VALUE"]

PARKED, RUNNING, GONE = "parked", "running", "gone"


@dataclass(frozen=True, slots=True)
class DebugOrder:
    """A command for parked threads.

    Attributes:
        line: a command of pdb; None only asks who is parked.
        who: process id and number of each session that is meant; None means all.
        timeout_s: how long to wait for the command's output.
    """

    line: str | None
    who: Sequence[tuple[str, int]] | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class BreakpointReport:
    """A thread that has stopped at a breakpoint, and the output of its last command.

    Attributes:
        process_id: id of the process.
        number: number of the thread's session, unique in its process.
        actor: name and rank of the actor; or names of process and thread, if the thread belongs to no actor.
        labels: names by which commands select it.
        function: function that the thread is in.
        file: file of the function.
        line: line in the file.
        code: text of the line.
        for_s: seconds since the breakpoint.
        state: ``parked``; ``running`` during a command; ``gone`` after the thread was released.
        output: output of the command.

    Example:
        ```python
        from skipper.control import Actor, endpoint, this_host
        from skipper.control.observe import BreakpointReport, cast_command, parked

        class Trainer(Actor):
            @endpoint
            def step(self, batch: int) -> int:
                loss = batch * 2
                breakpoint()
                return loss

        trainer = this_host().spawn_procs(name="workers").spawn("trainer", Trainer)
        loss = trainer.step.call_one(21)
        reports: list[BreakpointReport] = []
        while not reports:
            reports = parked()
        print(reports[0].function)  # Trainer.step
        cast_command("!loss = 100")
        cast_command("continue")
        print(loss.get(timeout=60))  # 100
        ```
    """

    process_id: str
    number: int
    actor: str
    labels: Sequence[str]
    function: str
    file: str
    line: int
    code: str
    for_s: float
    state: str
    output: str


_serving = threading.Lock()
_sessions: dict[int, DebugSession] = {}
_numbers = itertools.count(1)


def park(frame: FrameType) -> None:
    """Stop the calling thread at the next line of ``frame`` and hand it over to the user who debugs the job."""
    session = DebugSession(frame)
    session.announce()
    session.pdb.set_trace(frame)


def parked_actors() -> set[int]:
    """Numbers of the actors' meshes that have a breakpoint's session in this process."""
    return {session.uid for session in list(_sessions.values()) if session.state == PARKED}


def answer(process: Process, order: DebugOrder) -> list[BreakpointReport]:
    """Pass a command on to those sessions of this process that it is for, and wait for their output."""
    meant = [
        session
        for session in list(_sessions.values())
        if order.who is None or (process.me.id, session.number) in order.who
    ]
    if order.line is None:
        return [session.report(process, "") for session in meant]
    deadline = time.monotonic() + order.timeout_s
    begun = [session for session in meant if session.begin(order.line, deadline)]
    outputs = {session.number: session.finish(deadline) for session in begun}
    return [session.report(process, outputs.get(session.number, "")) for session in meant]


class DebugSession:
    """One thread at a breakpoint, until it is released."""

    def __init__(self, frame: FrameType) -> None:
        here = current_context.get()
        self.number = next(_numbers)
        self.since_s = time.monotonic()
        self.state = RUNNING
        self.uid = 0
        thread = threading.current_thread().name
        if here is None:
            name = current_runtime.current().me.name
            self.actor, self.labels = f"{name} {thread}", [name, thread]
        else:
            actor = local_actor(here.actor_instance)
            self.uid = actor.uid
            self.actor = str(actor.ref)
            self.labels = [actor.name, self.actor, f"{actor.name}:{actor.rank.rank}"]
        self.pdb = _Pdb(self, _outermost(frame))
        self._changed = threading.Condition()
        self._output = io.StringIO()
        self._wanted: Promise[str] | None = None
        self._in_use = threading.Lock()
        self._frame: FrameType | None = frame

    # The parked thread

    def announce(self) -> None:
        """Tell the user at the script."""
        name = ""
        process = current_runtime.current()
        try:
            name = f" --job {process.request(process.root, SERVE).get(_SERVE_TIMEOUT_S)}"
        except ControlError as error:
            name = f"; the job cannot be joined yet: {error}"
        assert self._frame is not None
        where = f"{self._frame.f_code.co_filename}:{self._frame.f_lineno}"
        sys.stderr.write(f"control: {self.actor} is parked at {where}: skipper debug{name}\n")
        sys.stderr.flush()

    def readline(self) -> str:
        """The next command, for pdb to read."""
        with self._changed:
            self.state = PARKED
            _sessions[self.number] = self  # from here on it takes commands: an earlier one would be lost
            wanted = self._wanted = Promise()
            self._changed.notify_all()
        try:
            return wanted.get()  # an actor that fails in the meantime is unwound from here
        except BaseException:
            self.let_go()
            raise

    def write(self, text: str) -> int:
        """Take output that pdb writes."""
        with self._changed:
            return self._output.write(text)

    def let_go(self) -> None:
        """The thread continues by itself."""
        _sessions.pop(self.number, None)
        with self._changed:
            self.state = GONE
            self._frame = None
            self._changed.notify_all()

    # Those who debug

    def begin(self, line: str, deadline: float) -> bool:
        """Pass a command on; False if another one is still running at the deadline."""
        if not self._in_use.acquire(timeout=max(deadline - time.monotonic(), 0)):
            return False
        with self._changed:
            self._changed.wait_for(lambda: self.state != RUNNING, max(deadline - time.monotonic(), 0))
            if self.state != PARKED:
                self._in_use.release()
                return False
            self._output = io.StringIO()
            self.state = RUNNING
            wanted, self._wanted = self._wanted, None
        assert wanted is not None  # it is parked
        wanted.settle_by(lambda: f"{line}\n")
        return True

    def finish(self, deadline: float) -> str:
        """What the command printed until it was done, or until the deadline."""
        try:
            with self._changed:
                self._changed.wait_for(lambda: self.state != RUNNING, max(deadline - time.monotonic(), 0))
                said = self._output.getvalue()
        finally:
            self._in_use.release()
        said = said.removesuffix(self.pdb.prompt)
        return said if len(said) <= MAX_OUTPUT_CHARS else f"[...]{said[-MAX_OUTPUT_CHARS:]}"

    def report(self, process: Process, output: str) -> BreakpointReport:
        """The report for other processes."""
        frame, line = self.pdb.place(self._frame)
        code = frame.f_code if frame is not None else None
        return BreakpointReport(
            process_id=process.me.id,
            number=self.number,
            actor=self.actor,
            labels=self.labels,
            function=code.co_qualname if code is not None else "",
            file=code.co_filename if code is not None else "",
            line=line,
            code=linecache.getline(code.co_filename, line).strip() if code is not None else "",
            for_s=time.monotonic() - self.since_s,
            state=self.state,
            output=output,
        )


class _Terminal(io.TextIOBase):
    """What a session's pdb, and the code that it runs, use as a terminal."""

    def __init__(self, session: DebugSession) -> None:
        self._session = session

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding, for code that encodes text itself."""
        return "utf-8"

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        """The next command."""
        return self._session.readline()

    def write(self, text: str) -> int:
        """Take output."""
        return self._session.write(text)


class _Pdb(pdb.Pdb):
    """pdb for a session. It ends with the endpoint, since this library's own code called that."""

    def __init__(self, session: DebugSession, outermost: FrameType) -> None:
        terminal: Any = _Terminal(session)
        super().__init__(
            stdin=terminal, stdout=terminal, skip=["skipper.control.runtime.*"], nosigint=True, readrc=False
        )
        self.prompt = "(Pdb) "
        self._session = session
        self._outermost: FrameType | None = outermost

    def place(self, first: FrameType | None) -> tuple[FrameType | None, int]:
        """The current frame of pdb, and its line."""
        if self._session.state == PARKED and self.stack:
            frame, line = self.stack[self.curindex]
            return frame, line or 0
        return first, first.f_lineno if first is not None else 0

    def set_continue(self) -> None:
        """Continue to the next breakpoint, if there is one."""
        super().set_continue()
        if not self.breaks:
            self._end()

    def set_quit(self) -> None:
        """End the endpoint with an exception."""
        super().set_quit()
        self._end()

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        """Stop where pdb should; and release the thread once the endpoint has ended."""
        followed = super().dispatch_return(frame, arg)
        if frame is self._outermost and frame.f_code.co_code[frame.f_lasti] != _YIELD:
            self.reset()
            sys.settrace(None)
            self._end()
            return None
        return followed

    def _end(self) -> None:
        self._outermost = None
        self._session.let_go()


def _outermost(frame: FrameType) -> FrameType:
    """The endpoint's own frame, which this library has called; or the thread's first."""
    while frame.f_back is not None and not frame.f_back.f_globals.get("__name__", "").startswith(_RUNTIME):
        frame = frame.f_back
    return frame


def serve_this_job() -> str:
    """Serve the job of this script unless it is served already; returns the name under which it can be joined."""
    me = current_runtime.current().me
    with _serving:  # many threads may reach a breakpoint at once
        for name in join_file.running():
            if join_file.read(join_file.path_of(name)).root.id == me.id:
                return name
        return serve_job().name


Address = str | os.PathLike[str] | None


class Debugger:
    """The breakpoints of one job. It has no state: several debuggers may work at once, and each may end at any time.

    Args:
        process: this process, which belongs to the job or visits it.
        timeout: seconds to wait for a command. One that takes longer, such as a step over a long call, continues.
    """

    def __init__(self, process: Process, *, timeout: float = 5.0) -> None:
        self._process = process
        self._timeout = timeout

    def parked(self, who: Iterable[str] = ()) -> list[BreakpointReport]:
        """The threads at a breakpoint, by process and in the order in which they reached it.

        Args:
            who: names of actors, with their rank or without: ``trainer``, ``trainer:3``; none means all.
        """
        words = list(who)
        return [report for report in self._order(None, None) if not words or any(w in report.labels for w in words)]

    def cast(self, line: str, who: Sequence[BreakpointReport] | None = None) -> list[BreakpointReport]:
        """Run a command of pdb in some of the parked threads, or in all; returns its output in each."""
        meant = self.parked() if who is None else who
        return self._order(line, [(report.process_id, report.number) for report in meant]) if meant else []

    def _order(self, line: str | None, who: Sequence[tuple[str, int]] | None) -> list[BreakpointReport]:
        work = 0.0 if line is None else self._timeout
        answers = survey(self._process, "debug", DebugOrder(line, who, work), timeout=self._timeout, work=work)
        return [report for answer in answers for report in answer.value() or ()]


def parked(address: Address = None, *, timeout: float = 5.0) -> list[BreakpointReport]:
    """Which actors of a running job are parked at a `breakpoint()` (see `job_status` for the address).

    Raises:
        JoinError: as `join` says.
        DeadlineError: (a `TimeoutError`) the script did not answer.
        SupervisionError: the script is gone.
    """
    with visiting(address, timeout=timeout) as process:
        return Debugger(process, timeout=timeout).parked()


def cast_command(
    line: str, who: Iterable[str] = (), address: Address = None, *, timeout: float = 5.0
) -> dict[str, str]:
    """Run a command of pdb in parked actors, such as ``p loss`` or ``continue``.

    Args:
        line: the command.
        who: names of actors, with or without a rank; none means all that are parked.
        address: the address of the job, as for `job_status`.
        timeout: in seconds.

    Returns:
        The output of the command, by actor.

    Raises:
        JoinError: as `join` says.
        DeadlineError: (a `TimeoutError`) the script did not answer.
        SupervisionError: the script is gone.
    """
    with visiting(address, timeout=timeout) as process:
        debugger = Debugger(process, timeout=timeout)
        meant = [report for report in debugger.parked(who) if report.state == PARKED]
        return {report.actor: report.output for report in debugger.cast(line, meant)}
