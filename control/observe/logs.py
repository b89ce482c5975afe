"""`collect_logs`: the output of every process of the job, at the script: prefixed, aggregated, in files, bounded."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import re
import sys
import threading
import time
from bisect import bisect_right
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from skipper.control.model.errors import AlreadyInJobError, ControlError
from skipper.control.observe import log_forwarder
from skipper.control.observe.job_query import survey
from skipper.control.observe.log_reader import Collector, LogSource
from skipper.control.runtime import current_runtime
from skipper.control.runtime.procs.output_capture import Redirection
from skipper.control.support.private_file import make_folder, open_log

if TYPE_CHECKING:
    from skipper.control.runtime.process import Process


LAST_WORDS_S = 2.0
"""How long the end of the script waits for what is still in the pipes, and for its own output."""

MAX_WAITING = 20_000
"""Lines that wait for a script whose output is slow; those beyond are dropped, and counted."""

_log = logging.getLogger("skipper.control")
_INDEX = re.compile(r"'\w+': (\d+)")


@dataclass(frozen=True, slots=True)
class LogOptions:
    """What becomes of the output; `Logs.change` changes it while the job runs.

    Attributes:
        shown: whether it comes to the script's standard output and error at all.
        prefixed: whether each line says whose it is.
        aggregate_s: how long a line is held back to see who else says so; 0 for not at all. With one process nothing
            is held back.
        max_lines_per_s: of one process; those beyond are dropped, and counted.
    """

    shown: bool = True
    prefixed: bool = True
    aggregate_s: float = 0.2
    max_lines_per_s: int = 2000

    def __post_init__(self) -> None:
        if self.aggregate_s < 0:
            raise ValueError(f"aggregate_s must not be negative, got {self.aggregate_s}")
        if self.max_lines_per_s < 1:
            raise ValueError(f"max_lines_per_s must be at least 1, got {self.max_lines_per_s}")


class Logs:
    """The output of a job's processes, as it is collected; a context manager.

    Attributes:
        options: those in force.
        folder: where each process has its files; None for no files.
        dropped: lines that were not shown, since there were too many, or the script's output was too slow.
    """

    def __init__(self, process: Process, options: LogOptions, folder: Path | None, level: int | None) -> None:
        self.options = options
        self.folder = folder
        self.dropped = 0
        self._process = process
        self._closed = False
        self._is_keeping = folder is not None
        self._files: dict[tuple[str, int, int], IO[str]] = {}
        self._aggregator = Aggregator(options.aggregate_s)
        self._rates: dict[tuple[str, int], _Rate] = {}
        self._writer = OutputWriter()
        self._collector = Collector(self._take, self._tick)
        self._collector.start()
        log_forwarder.collects(process, self._collector)
        process.ending.settled.append(self._hear_hosts)
        process.ending.after.append(self._end)
        self._redirect(Redirection(self._collector.address, level))
        self._hear_hosts()  # so that it is known how many speak

    def change(
        self,
        *,
        shown: bool | None = None,
        prefixed: bool | None = None,
        aggregate_s: float | None = None,
        max_lines_per_s: int | None = None,
    ) -> LogOptions:
        """Change options from now on; None leaves one as it is.

        Raises:
            ValueError: a bound makes no sense.
        """
        given: dict[str, Any] = {
            "shown": shown,
            "prefixed": prefixed,
            "aggregate_s": aggregate_s,
            "max_lines_per_s": max_lines_per_s,
        }
        self.options = dataclasses.replace(
            self.options, **{name: value for name, value in given.items() if value is not None}
        )
        self._aggregator.window_s = self.options.aggregate_s
        return self.options

    def close(self) -> None:
        """Let all processes write to where they wrote before; what they have written so far is still shown."""
        if not self._closed:
            self._redirect(Redirection(""))
            self._hear_hosts()
            self._end()

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _redirect(self, redirection: Redirection) -> None:
        survey(self._process, "logs", redirection, timeout=5.0)

    def _hear_hosts(self) -> None:
        """Wait for what has been written on other hosts."""
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
        self._is_keeping = False
        files, self._files = self._files, {}
        for file in files.values():
            file.close()

    # On the collector's thread

    def _take(self, source: LogSource, text: str) -> None:
        label = label_of(source.name)
        if self.folder is not None and self._is_keeping:
            self._keep(source, text)
        if not self.options.shown:
            return
        rate = self._rates.setdefault((source.host, source.pid), _Rate())
        if not rate.admits(self.options.max_lines_per_s):
            self.dropped += 1
            return
        self._aggregator.add(source.stream, label, text, time.monotonic())

    def _tick(self) -> float | None:
        now = float("inf") if self._collector.is_over else time.monotonic()
        for (host, pid), rate in self._rates.items():
            if number := rate.refused(now):
                whose = f"pid {pid} on {host}" if host else f"pid {pid}"
                text = f"{number} lines of {whose} dropped: more than {self.options.max_lines_per_s} in a second"
                self._writer.put(Line(2, "logs", text), "[logs] ")
        for line in self._aggregator.due(now, self._collector.speakers()):
            if not self._writer.put(line, self._prefix(line)):
                self.dropped += 1
        until = self._aggregator.next_s()
        waits = [until - now] if until is not None else []
        waits += [1.0] if any(rate.has_refused for rate in self._rates.values()) else []
        return max(min(waits), 0.001) if waits else None

    def _prefix(self, line: Line) -> str:
        if not self.options.prefixed:
            return ""
        return f"[{line.alike} similar lines] " if line.alike > 1 else f"[{line.source}] "

    def _keep(self, source: LogSource, text: str) -> None:
        try:
            self._file(source).write(f"{text}\n")
        except (OSError, ValueError) as error:  # the disk is full, say: what is shown goes on
            _log.warning("the output of processes is kept no more in %s: %s", self.folder, error)
            self.folder = None

    def _file(self, source: LogSource) -> IO[str]:
        key = (source.host, source.pid, source.stream)
        if key not in self._files:
            assert self.folder is not None  # asked for where there is one
            ending = "out" if source.stream == 1 else "err"
            words = (label_of(source.name), source.host, str(source.pid))
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(word for word in words if word))
            self._files[key] = os.fdopen(open_log(self.folder / f"{name}.{ending}"), "a", 1, "utf-8")
        return self._files[key]


def collect_logs(
    *, options: LogOptions | None = None, folder: str | Path | None = None, level: int | None = None
) -> Logs:
    """Have the output of every process of this script's job, now and later, come to the script.

    Each line says whose it is, ``[trainer 3] ...``; what several say alike is shown once, ``[16 similar lines] ...``.
    It is taken from the descriptors 1 and 2, so what C libraries print comes, too, and so do the last words of a
    process that is killed. Who writes never waits for the script's output: lines that are too many are dropped, and
    counted.

    Args:
        options: see `LogOptions`.
        folder: where each process gets a file for each of its streams, whole and as it was written, of mode 0600; it is
            made, with mode 0700.
        level: have the processes' `logging` speak from this level on, on their standard error.

    Raises:
        AlreadyInJobError: this process is not the root of its job.
    """
    process = current_runtime.current()
    if process.root.id != process.me.id:
        raise AlreadyInJobError(f"{process.me.name} belongs to the job of another process, which collects the output")
    where = None if folder is None else Path(folder)
    if where is not None:
        make_folder(where)
    return Logs(process, options or LogOptions(), where, level)


def label_of(name: str) -> str:
    """A process as a prefix names it: ``workers{'gpus': 3}`` is ``workers 3``."""
    base, brace, point = name.partition("{")
    return f"{base} {','.join(_INDEX.findall(point))}" if brace else name


class _Rate:
    """The lines of one process in the current second."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._count = 0
        self._refused = 0
        self._untold = 0

    @property
    def has_refused(self) -> bool:
        """Whether there is something to tell."""
        return self._refused + self._untold > 0

    def admits(self, most: int) -> bool:
        """Count a line; whether it is one of the first ``most`` in its second."""
        now = time.monotonic()
        self._look_at(now)
        self._count += 1
        if self._count > most:
            self._refused += 1
            return False
        return True

    def refused(self, now: float) -> int:
        """How many lines were refused in seconds that are over; each is reported once."""
        self._look_at(now)
        number, self._untold = self._untold, 0
        return number

    def _look_at(self, now: float) -> None:
        if now - self._began_s >= 1.0:
            self._untold += self._refused
            self._began_s, self._count, self._refused = now, 0, 0


class OutputWriter:
    """A thread that writes to the script's output, which may be slow; what waits for it is bounded."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, str]] = deque()
        self._changed = threading.Condition()
        self._dropped = 0
        self._writing = False
        self._closing = False
        threading.Thread(target=self._run, name="control-logs-writer", daemon=True).start()

    def put(self, line: Line, prefix: str) -> bool:
        """Take a line; False where it is dropped."""
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                self._dropped += 1
                return False
            self._waiting.append((line.stream, f"{prefix}{line.text}\n"))
            self._changed.notify_all()
            return True

    def flush(self, timeout: float) -> bool:
        """Wait until all is written, ``timeout`` seconds at most; False where it is not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._writing), timeout)

    def close(self, timeout: float) -> None:
        """End once all is written, and wait for that, ``timeout`` seconds at most."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self.flush(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._waiting) or self._closing)
                if not self._waiting:
                    return
                batch, self._waiting = list(self._waiting), deque()
                dropped, self._dropped = self._dropped, 0
                self._writing = True
            if dropped:
                batch.append((2, f"[logs] {dropped} lines dropped: this output is too slow\n"))
            try:
                _write(batch)
            except (OSError, ValueError):  # nobody reads any more, or it has been closed: the lines are lost with it
                continue


def _write(batch: list[tuple[int, str]]) -> None:
    """Write, as few times as keeps the order between the two streams."""
    stream, text = 1, ""
    for number, line in batch:
        if number != stream and text:
            _write_to(stream, text)
            text = ""
        stream = number
        text += line
    _write_to(stream, text)


def _write_to(number: int, text: str) -> None:
    stream = sys.stdout if number == 1 else sys.stderr  # those of now: a notebook, or a test, has put others there
    stream.write(text)
    stream.flush()


MAX_HELD = 1000
"""How many lines are held back at most; the oldest come out when more come in."""

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(frozen=True, slots=True)
class Line:
    """A line as it is shown.

    Attributes:
        stream: 1 for the standard output, 2 for the standard error.
        source: label of the process that said it, or that said it first.
        text: without its end.
        alike: how many processes said so.
    """

    stream: int
    source: str
    text: str
    alike: int = 1


@dataclass(slots=True)
class _LineGroup:
    kind: tuple[int, str]
    source: str
    text: str
    until_s: float
    sources: set[str]


class Aggregator:
    """Holds lines back for ``window_s`` seconds at most (0: not at all) to find those that several processes say.

    Lines are alike if they differ in numbers only and come from different processes. What one process repeats stays
    repeated, and its lines stay in their order: a line is never shown together with one that stands before something
    that its process has said earlier.
    """

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._numbers = itertools.count()
        self._held: OrderedDict[int, _LineGroup] = OrderedDict()
        self._of_kind: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
        self._last_of: dict[str, int] = {}

    def add(self, stream: int, source: str, text: str, now_s: float) -> None:
        """Take a line."""
        kind = (stream, _NUMBERS.sub("#", text))
        alike = self._of_kind[kind]
        behind = bisect_right(alike, self._last_of.get(source, -1))
        if behind < len(alike):
            number = alike[behind]
            self._held[number].sources.add(source)
        else:
            number = next(self._numbers)
            alike.append(number)
            self._held[number] = _LineGroup(kind, source, text, now_s + self.window_s, {source})
        self._last_of[source] = number

    def due(self, now_s: float, speakers: int) -> list[Line]:
        """The lines to show by now; a line that all ``speakers`` processes have said need not wait any longer."""
        lines = []
        while self._held:
            number, group = next(iter(self._held.items()))
            if now_s < group.until_s and len(group.sources) < speakers and len(self._held) <= MAX_HELD:
                break
            del self._held[number]
            alike = self._of_kind[group.kind]
            alike.pop(0)  # its number: groups of a kind come out in their order
            if not alike:
                del self._of_kind[group.kind]
            lines.append(Line(group.kind[0], group.source, group.text, len(group.sources)))
        if not self._held:
            self._last_of.clear()
        return lines

    def next_s(self) -> float | None:
        """When the next line is due; None where nothing is held back."""
        return next(iter(self._held.values())).until_s if self._held else None
