"""The output of every process of the job at the script: labelled, without repetition, bounded; all of it in files.

`show_output` is what a script has by default; `collect_logs` is for scripts that want something else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipper.control.model.errors import AlreadyInJobError, ControlError
from skipper.control.observe import log_forwarder
from skipper.control.observe.job_query import survey
from skipper.control.observe.log_files import LogFiles
from skipper.control.observe.log_lines import BURST_S, Aggregator, Line, LineBudget, label_of
from skipper.control.observe.log_output import OutputWriter
from skipper.control.observe.log_reader import Collector, LogSource
from skipper.control.runtime import current_runtime
from skipper.control.runtime.procs.output_capture import Redirection
from skipper.control.support.private_file import make_folder

if TYPE_CHECKING:
    from skipper.control.runtime.process import Process

LOGS_VARIABLE = "SKIPPER_LOGS"
"""Environment variable that says what a script does with the output of its job's processes."""
RAW, OFF, LABELLED = "raw", "off", "labelled"

LAST_WORDS_S = 2.0
"""How long the end of the script waits for what is still in the pipes, and for its own output."""

FIRST_REPORT_S = 1.0
REPORT_S = 5.0
"""How often the script reports dropped lines, as long as lines are dropped."""

FLOOD_PART = 0.1
"""The part of all shown lines for processes that exceed their limit for longer than a second: output that scrolls
faster than anybody can read says no more than a sample of it."""
FLOOD_BURST_S = 1.0

_FOR_ERRORS = 0.25
"""The part of all lines that is reserved for the standard error, even if the standard output has many lines."""


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How the output of processes is shown; `Logs.change` changes it while the job runs.

    The example of `Logs` shows one.

    Attributes:
        shown: whether the output is written to the script's standard output and error at all.
        prefixed: whether each line begins with the name of its process.
        aggregate_s: how long a line is held back to find out which other processes write the same; 0 for not at all.
            With one process nothing is held back.
        max_lines_per_s: limit for each stream of one process, on average; ten times as many may come in a burst.
            Further lines are dropped and counted.
        max_total_lines_per_s: the same limit for all processes, where a line that several write counts once. Streams
            that exceed ``max_lines_per_s`` for longer than a second share a tenth of it.
    """

    shown: bool = True
    prefixed: bool = True
    aggregate_s: float = 0.2
    max_lines_per_s: int = 100
    max_total_lines_per_s: int = 200

    def __post_init__(self) -> None:
        if self.aggregate_s < 0:
            raise ValueError(f"aggregate_s must not be negative, got {self.aggregate_s}")
        for name in ("max_lines_per_s", "max_total_lines_per_s"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class Logs:
    """The output of a job's processes, as it is collected; a context manager.

    Attributes:
        options: the present options.
        dropped: lines that were not shown, because there were too many, or the script's output was too slow.

    Example:
        ```python
        import tempfile

        from skipper.control import Actor, endpoint, this_host
        from skipper.control.observe import LogOptions, Logs, collect_logs

        class Sampler(Actor):
            @endpoint
            def sample(self) -> None:
                print("8 prompts")

        samplers = this_host().spawn_procs({"gpus": 2}).spawn("samplers", Sampler)
        logs: Logs
        with collect_logs(options=LogOptions(max_lines_per_s=1000), folder=tempfile.mkdtemp()) as logs:
            samplers.sample.call().get(timeout=60)  # [samplers x2] 8 prompts
            logs.change(shown=False)  # from now on in the files only
        ```
    """

    def __init__(
        self, process: Process, options: LogOptions, files: Sequence[LogFiles], own: Sequence[LogFiles]
    ) -> None:
        self.options = options
        self.dropped = 0
        self._process = process
        self._closed = False
        self._files = files
        self._own_files = own
        self._drops = DropReport()
        self._aggregator = Aggregator(options.aggregate_s)
        self._flood_budget = LineBudget(FLOOD_BURST_S)
        self._budget = LineBudget(BURST_S)
        self._labels: dict[tuple[str, tuple[str, ...]], str] = {}
        self._writer = OutputWriter()
        self._collector = Collector(self._take, self._tick, self._keep, self._admit)
        self._collector.start()
        log_forwarder.collects(process, self._collector)
        self._before = process.state.redirection or Redirection("")
        process.ending.settled.append(self._hear_hosts)
        process.ending.after.insert(0, self._end)

    @property
    def folder(self) -> Path | None:
        """The folder with the files of each process; None if there is none, or none yet."""
        return self._files[-1].folder if self._files else None

    def begin(self, level: int | None = None) -> None:
        """Collect the output of all processes, those that run now and those that start later."""
        redirection = Redirection(self._collector.address, level)
        if self._process.children.alive() or self._process.remote_launch.hosts():
            survey(self._process, "logs", redirection, timeout=5.0)
            self._hear_hosts()  # so that the number of writers is known
        else:
            self._process.state.redirection = redirection

    def change(
        self,
        *,
        shown: bool | None = None,
        prefixed: bool | None = None,
        aggregate_s: float | None = None,
        max_lines_per_s: int | None = None,
        max_total_lines_per_s: int | None = None,
    ) -> LogOptions:
        """Change options from now on; None leaves one as it is.

        Raises:
            ValueError: a limit is out of its range.
        """
        given: dict[str, Any] = {
            "shown": shown,
            "prefixed": prefixed,
            "aggregate_s": aggregate_s,
            "max_lines_per_s": max_lines_per_s,
            "max_total_lines_per_s": max_total_lines_per_s,
        }
        self.options = dataclasses.replace(
            self.options, **{name: value for name, value in given.items() if value is not None}
        )
        self._aggregator.window_s = self.options.aggregate_s
        return self.options

    def close(self) -> None:
        """Restore where all processes wrote before; what they have written so far is still shown."""
        if not self._closed:
            survey(self._process, "logs", self._before, timeout=5.0)
            self._hear_hosts()
            self._end()

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _hear_hosts(self) -> None:
        """Wait for the output of other hosts."""
        hosts = tuple(self._process.remote_launch.hosts())
        if hosts:
            with contextlib.suppress(ControlError):  # as far as it comes in time
                self._process.request_all(hosts, log_forwarder.FLUSH_OUTPUT).get(LAST_WORDS_S)

    def _end(self) -> None:
        if self._closed:
            return
        self._closed = True
        ending = self._process.ending
        for calls, call in ((ending.settled, self._hear_hosts), (ending.after, self._end)):
            if call in calls:
                calls.remove(call)
        if self._process.closing:
            self._collector.lose()
        if self._collector.wait_until_silent(LAST_WORDS_S):
            log_forwarder.collects_no_more(self._collector)
            self._collector.close()
            self._writer.close(LAST_WORDS_S)
        else:  # a process still writes there and must not get an error: its output is read to the end
            self._writer.flush(LAST_WORDS_S)
        for files in self._own_files:
            files.close()

    # On the collector's thread

    def _keep(self, source: LogSource, chunk: bytes) -> None:
        for files in self._files:
            files.keep(source, chunk)

    def _admit(self, source: LogSource, count: int) -> int:
        if not self.options.shown:
            return 0
        now_s = time.monotonic()
        admitted = source.budget.admit(count, self.options.max_lines_per_s, now_s)
        if source.budget.is_flooded:
            most_per_s = max(int(self.options.max_total_lines_per_s * FLOOD_PART), 1)
            admitted = self._flood_budget.admit(admitted, most_per_s, now_s)
        if admitted < count:
            self._drop(count - admitted, self._label(source), source)
        return admitted

    def _take(self, source: LogSource, text: str) -> None:
        if self.options.shown:
            self._aggregator.add(source.stream, self._label(source), text, time.monotonic())

    def _label(self, source: LogSource) -> str:
        key = (source.name, source.actors)
        if key not in self._labels:
            self._labels[key] = label_of(*key)
        return self._labels[key]

    def _tick(self) -> float | None:
        now = float("inf") if self._collector.is_over else time.monotonic()
        for line in self._aggregator.due(now, self._collector.speakers()):
            reserved = 0.0 if line.stream == 2 else _FOR_ERRORS
            is_admitted = self._budget.admit(1, self.options.max_total_lines_per_s, time.monotonic(), reserved=reserved)
            if not is_admitted or not self._writer.put(line, prefixed=self.options.prefixed):
                self._drop(line.alike, line.source)
        if report := self._drops.due(now):
            self._writer.put(Line(2, "logs", report), prefixed=True, even_if_full=True)
        waits = [until - now for until in (self._aggregator.next_s(), self._drops.due_s()) if until is not None]
        return max(min(waits), 0.001) if waits else None

    def _drop(self, count: int, label: str, source: LogSource | None = None) -> None:
        self.dropped += count
        place, is_whole = None, True
        for files in self._files:
            place, is_whole = files.folder if source is None else files.path_of(source), files.is_whole
        self._drops.add(count, label, place, time.monotonic(), self.folder, is_whole=is_whole)


class DropReport:
    """Counts dropped lines, and reports from time to time how many, whose, and where they are saved."""

    def __init__(self) -> None:
        self._count = 0
        self._labels: dict[str, None] = {}
        self._places: set[Path | None] = set()
        self._folder: Path | None = None
        self._is_whole = True
        self._due_s: float | None = None
        self._told_s = float("-inf")

    def add(
        self, count: int, label: str, place: Path | None, now_s: float, folder: Path | None, *, is_whole: bool = True
    ) -> None:
        """Count lines.

        Args:
            count: how many.
            label: label of the process.
            place: the file or the folder that has them; None if there is none.
            now_s: the time.
            folder: folder of all files.
            is_whole: whether the files hold all that was written.
        """
        self._is_whole = is_whole
        self._count += count
        self._labels[label] = None
        self._places.add(place)
        self._folder = folder
        if self._due_s is None:
            self._due_s = max(now_s + FIRST_REPORT_S, self._told_s + REPORT_S)

    def due_s(self) -> float | None:
        """When the next report is due; None if there is nothing to report."""
        return self._due_s

    def due(self, now_s: float) -> str:
        """The report that is due; empty if none is."""
        if self._due_s is None or now_s < self._due_s:
            return ""
        first, *others = self._labels
        whose = f"{first} and {len(others)} more" if others else first
        place = next(iter(self._places)) if len(self._places) == 1 else self._folder
        what = "all of them are" if self._is_whole else "the latest of them are"
        where = "" if None in self._places else f"; {what} in {place}"
        text = f"… {self._count:,} lines of {whose} dropped{where}"
        self._count, self._due_s, self._told_s = 0, None, now_s
        self._labels.clear()
        self._places.clear()
        return text


_shown: Logs | None = None
"""The output that the script shows by default."""
_kept: LogFiles | None = None
_lock = threading.Lock()


def show_output(process: Process) -> None:
    """In a script that starts: show and keep what the processes of its job write, as `LOGS_VARIABLE` says.

    Raises:
        ValueError: the variable holds another word.
    """
    global _shown, _kept
    mode = os.environ.get(LOGS_VARIABLE) or LABELLED
    if mode not in (RAW, OFF, LABELLED):
        raise ValueError(f"{LOGS_VARIABLE} is {RAW}, {OFF} or {LABELLED}, not {mode!r}")
    with _lock:
        _shown = _kept = None
        if mode != RAW:
            _kept = LogFiles(None, process.me.job)
            _shown = Logs(process, LogOptions(shown=mode == LABELLED), [_kept], [_kept])
            _shown.begin()


def shown_output() -> Logs | None:
    """The output that this script shows by default, to `change` it; None if it shows none, or nothing runs yet."""
    return _shown


def collect_logs(
    *, options: LogOptions | None = None, folder: str | Path | None = None, level: int | None = None
) -> Logs:
    """Show the output of every process of this script's job, now and later, in another way than by default.

    Each line begins with the name of its process, ``[trainers gpus=3] ...``; a line that several write is shown once,
    ``[trainers x16] ...``. It is read from the file descriptors 1 and 2, so the output of C libraries is included, and
    so are the last lines of a process that is killed. A process never waits for the script's output: if there are too
    many lines, some are dropped, and counted.

    Args:
        options: see `LogOptions`.
        folder: a folder in which each process gets a file for each of its streams, complete and unchanged, of mode
            0600; it is created with mode 0700.
        level: make the `logging` of the processes write from this level on, to their standard error.

    Raises:
        AlreadyInJobError: this process is not the root of its job.
    """
    process = current_runtime.current()
    if process.root.id != process.me.id:
        raise AlreadyInJobError(f"{process.me.name} belongs to the job of another process: configure the output there")
    own: list[LogFiles] = []
    if folder is not None:
        make_folder(Path(folder))
        own.append(LogFiles(Path(folder), process.me.job, is_stamped=False))
    logs = Logs(process, options or LogOptions(), [*([_kept] if _kept else []), *own], own)
    logs.begin(level)
    return logs
