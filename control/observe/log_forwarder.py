"""`LogForwarder`: sends the output of an attached host's processes to the script, no faster than the script takes it.

It runs in the process that represents the job on the host. One batch is in flight at a time. Meanwhile the next batch
is filled; once it is full, the pipes are not read, so that the writers wait.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skipper.control.api.mesh import HOST_NAME
from skipper.control.model.errors import ControlError
from skipper.control.model.future import Future, Promise
from skipper.control.observe.log_copy import OutputCopy
from skipper.control.observe.log_reader import Collector, LogChunk, LogReader, LogSource
from skipper.control.runtime.procs import output_capture
from skipper.control.runtime.procs.output_capture import Redirection
from skipper.control.runtime.requests import Request

if TYPE_CHECKING:
    from skipper.control.runtime.messages import Mail
    from skipper.control.runtime.process import Process

OUTPUT: Request[tuple[str, list[LogChunk]], None] = Request("output", "has not taken output")
"""Take what processes of another host have written for the collector of an address; answer when there is room."""
FLUSH_OUTPUT: Request[None, None] = Request("flush_output")
"""Answer once the script has what processes of this host have written."""

BATCH_NBYTES = 256 << 10
"""When this much waits, no more is read; the last chunk may exceed it."""

LAST_WORDS_S = 2.0
"""How long the end of this process waits for the script to take what has been written."""

_lock = threading.Lock()
_forwarder: LogForwarder | None = None
"""The forwarder of this process, which represents its job on a host."""
_earlier: list[LogForwarder] = []
"""Earlier forwarders, to which processes may still write."""


class LogForwarder(LogReader):
    """A thread that reads all pipes of this host; ``sink`` is the address of the script's `Collector`."""

    def __init__(self, process: Process, sink: str) -> None:
        super().__init__("control-logs-forwarder")
        self.sink = sink
        self._process = process
        self._batch: list[LogChunk] = []
        self._nbytes = 0
        self._is_under_way = False
        self._waiting: list[Promise[None]] = []
        self._is_retired = False
        self._copies = {stream: OutputCopy(stream) for stream in (1, 2)}

    def retire(self) -> None:
        """End once no process writes to it any more; for any thread."""

        def retire() -> None:
            self._is_retired = True

        self.run_soon(retire)

    def flush(self) -> Future[None]:
        """A future that ends when the script has taken everything that was written before; for any thread."""
        flushed: Promise[None] = Promise()
        if not self.run_soon(lambda: self._waiting.append(flushed)):
            flushed.set_result(None)
        return flushed

    # On the thread

    def _opened(self, source: LogSource) -> None:
        self._batch.append((source.stream, source.words(), source.pid, b""))

    def _take(self, source: LogSource, chunk: bytes) -> None:
        self._copies[source.stream].write(chunk)
        self._batch.append((source.stream, source.words(), source.pid, chunk))
        self._nbytes += len(chunk)

    def _ended(self, source: LogSource) -> None:
        self._batch.append((source.stream, source.words(), source.pid, None))

    def _has_room(self) -> bool:
        return self._nbytes < BATCH_NBYTES

    def _next_s(self) -> float | None:
        if self.is_over:
            for copy in self._copies.values():
                copy.close()
        if self._is_under_way:
            return None  # its answer wakes this thread up
        if self._batch:
            self._send()
        elif self._waiting:
            return self._answer_those_who_wait()
        elif self._is_retired and not self._sources and not self.is_over:
            self._closing = True
            return 0.0
        return None

    def _send(self) -> None:
        batch, self._batch, self._nbytes = self._batch, [], 0
        self._is_under_way = True
        sent = self._process.request(self._process.root, OUTPUT, (self.sink, batch))
        sent.add_done_callback(lambda _: self.run_soon(self._arrived))

    def _arrived(self) -> None:
        self._is_under_way = False

    def _answer_those_who_wait(self) -> float | None:
        waiting, self._waiting = self._waiting, []
        if not self.is_over and self._round(0):  # something has to arrive first
            self._waiting += waiting
            return 0.0
        for flushed in waiting:
            flushed.set_result(None)
        return None


def answer(process: Process, redirection: Redirection) -> bool:
    """For a survey: redirect the output of this process, and of those that it launches from now on."""
    process.state.redirection = passed_on(process, redirection)
    if process.root_actor is not None or process.remote_launch.is_host:
        # The output of the others goes to the script's own; a joined process and an agent have their own.
        return True
    return output_capture.redirect(redirection, process.me.name)


def passed_on(process: Process, redirection: Redirection) -> Redirection:
    """The redirection for processes that this one has launched; on another host, this starts its forwarder."""
    global _forwarder
    if not process.remote_launch.is_host:
        return redirection
    with _lock:
        if _forwarder is not None and _forwarder.sink == redirection.sink:
            return Redirection(_forwarder.address, redirection.level)
        if _forwarder is None:
            process.ending.settled.append(_flush_at_the_end)
        else:
            _forwarder.retire()
            _earlier[:] = [*(one for one in _earlier if not one.is_over), _forwarder]
        if not redirection.sink:
            return redirection
        _forwarder = LogForwarder(process, redirection.sink)
        _forwarder.start()
        return Redirection(_forwarder.address, redirection.level)


def flushed(mail: Mail, _: None) -> Future[None]:
    """Serve `FLUSH_OUTPUT`."""
    return flush()


def flush() -> Future[None]:
    """On a host: a future that ends when the script has what has been written here so far."""
    with _lock:
        flushes = [one.flush() for one in dict.fromkeys([*_earlier, *([_forwarder] if _forwarder else [])])]
    return _all_of(flushes)


def _all_of(futures: Sequence[Future[None]]) -> Future[None]:
    if not futures:
        return Future.of(None)
    over: Promise[None] = Promise()
    left = set(range(len(futures)))
    counting = threading.Lock()

    def ended(number: int) -> None:
        with counting:
            left.discard(number)
            is_last = not left
        if is_last:
            over.set_result(None)

    for number, future in enumerate(futures):
        future.add_done_callback(lambda _, number=number: ended(number))  # type: ignore[misc]
    return over


def _flush_at_the_end() -> None:
    with contextlib.suppress(ControlError):  # the script does not take it
        flush().get(LAST_WORDS_S)


@dataclass(slots=True)
class _Taker:
    """A collector in the script, and the ids of the hosts from which something has come."""

    process: Process
    collector: Collector
    hosts: set[str] = field(default_factory=set)


_takers: dict[str, _Taker] = {}
"""The collectors of this process, by their addresses."""


def collects(process: Process, collector: Collector) -> None:
    """In the script: let a collector take what comes from other hosts."""
    _takers[collector.address] = _Taker(process, collector)


def collects_no_more(collector: Collector) -> None:
    """In the script: drop what still comes for a collector."""
    _takers.pop(collector.address, None)


def take(mail: Mail, batches: tuple[str, list[LogChunk]]) -> Future[None]:
    """In the script, serve `OUTPUT`: take a batch of a host's forwarder; the future ends when the next may be sent."""
    (sink, batch), sender = batches, mail.sender
    taken: Promise[None] = Promise()
    taker = _takers.get(sink)
    if taker is None:
        return Future.of(None)
    collector = taker.collector
    if sender.id not in taker.hosts:
        taker.hosts.add(sender.id)
        end = taker.process.remote_launch.end_of(sender.id)
        if end is not None:
            end.add_done_callback(lambda _: collector.lose(sender.id))
    collector.feed(sender.id, sender.name.removeprefix(HOST_NAME), batch, lambda: taken.set_result(None))
    return taken
