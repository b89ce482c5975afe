"""Debugging a job from outside: who is parked at a breakpoint, pdb's commands for some or all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from skipper.control.observe.debugger import PARKED, BreakpointReport, DebugOrder
from skipper.control.observe.job_query import survey
from skipper.control.observe.visit import visiting

if TYPE_CHECKING:
    from skipper.control.runtime.process import Process

Address = str | os.PathLike[str] | None


class Debugger:
    """The breakpoints of one job. It holds nothing: several may be at work, and any may go away at any time.

    Args:
        process: this one, which belongs to the job or visits it.
        timeout: seconds that a command is waited for. One that takes longer, such as a step over a long call, goes on.
    """

    def __init__(self, process: Process, *, timeout: float = 5.0) -> None:
        self._process = process
        self._timeout = timeout

    def parked(self, who: Iterable[str] = ()) -> list[BreakpointReport]:
        """Those at a breakpoint, by process and in the order in which they came there.

        Args:
            who: names of actors, with their rank or without: ``trainer``, ``trainer:3``; none means all.
        """
        words = list(who)
        return [report for report in self._order(None, None) if not words or any(w in report.labels for w in words)]

    def cast(self, line: str, who: Sequence[BreakpointReport] | None = None) -> list[BreakpointReport]:
        """Have some of them, or all that are parked, run a command of pdb's; with what it said at each."""
        meant = self.parked() if who is None else who
        return self._order(line, [(report.process_id, report.number) for report in meant]) if meant else []

    def resume(self, who: Sequence[BreakpointReport] | None = None) -> list[BreakpointReport]:
        """Let some, or all, go on."""
        return self.cast("continue", who)

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
    """Have parked actors run a command of pdb's, such as ``p loss`` or ``continue``.

    Args:
        line: the command.
        who: names of actors, with their rank or without; none means all that are parked.
        address: of the job, as `job_status` takes it.
        timeout: in seconds.

    Returns:
        What it said, by actor.

    Raises:
        JoinError: as `join` says.
        DeadlineError: (a `TimeoutError`) the script did not answer.
        SupervisionError: the script is gone.
    """
    with visiting(address, timeout=timeout) as process:
        debugger = Debugger(process, timeout=timeout)
        meant = [report for report in debugger.parked(who) if report.state == PARKED]
        return {report.actor: report.output for report in debugger.cast(line, meant)}
