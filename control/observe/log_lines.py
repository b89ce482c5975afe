"""From bytes to the lines that a terminal shows: where they end, what is shown, whose they are, which are alike."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_LINE_NBYTES = 16 << 10
"""Of a longer line, only the beginning is shown, with the length of the rest."""

IDLE_S = 0.5
"""Text without a line end, such as a prompt, is shown after this time."""

BAR_S = 5.0
"""How often a progress bar is shown, which a carriage return redraws."""

BURST_S = 10.0
"""What the bounds allow in this time may come at once: a traceback of every rank is not cut."""

DEFAULT_NAME = "procs"
"""The name of a mesh of processes that was given none."""

_RESET = "\x1b[0m"
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_ESCAPE = re.compile(
    r"(\x1b\[[0-9;:]*m)"  # colours, which are kept
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # cursor and screen: ECMA-48, 5.4
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # strings for the terminal: titles, clipboard, its own commands
    r"|\x1b[ -/]*[0-~]"  # all others of ECMA-35
    r"|[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
    r"|\x1b(?!\[[0-9;:]*m)"
)
_POINT = re.compile(r"'(\w+)': (\d+)")
_RANK = re.compile(r"(?: \w+=\d+)+$")
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def shown(line: bytes | bytearray) -> str:
    """A line that is safe for any terminal: the last state of a progress bar, colours, no other sequences."""
    text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
    if text.isprintable():
        return text
    text = _ESCAPE.sub(lambda found: found[1] or ("" if found[0][0] == "\x1b" else "\ufffd"), text)
    return text + _RESET if _COLOUR.search(text) else text


def label_of(name: str, actors: Sequence[str] = ()) -> str:
    """The name of a process in a prefix, in the user's own words: ``trainers gpus=3``.

    That is the name of its only actor, or else that of its mesh of processes, if it was given one.

    Args:
        name: name of the process, such as ``workers{'gpus': 3}``.
        actors: the meshes of its actors.
    """
    base, _, point = name.partition("{")
    if len(actors) == 1 or (base == DEFAULT_NAME and actors):
        base = "+".join(actors[:3])
    return " ".join([base, *(f"{axis}={rank}" for axis, rank in _POINT.findall(point))])


def mesh_of(label: str) -> str:
    """A label without the rank."""
    return _RANK.sub("", label)


class LineSplitter:
    """Makes lines from the chunks of one stream; what it holds is bounded."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._beyond = 0
        self._heard_s = 0.0
        self._bar_shown_s = float("-inf")
        self._is_bar = False
        self._was_shown = False

    def feed(self, chunk: bytes, now_s: float, room: int) -> list[str]:
        """Take a chunk; returns the first ``room`` lines that it ends, and forgets the others."""
        self._heard_s = now_s
        *lines, tail = chunk.split(b"\n", max(room, 0))
        texts = []
        for line in lines:
            self._hold(line)
            if (self._rest or self._beyond) or not self._was_shown:
                texts.append(self._take())
            self._begin()
        if b"\n" in tail:
            tail = tail[tail.rindex(b"\n") + 1 :]
            self._begin()
        if tail:
            self._hold(tail)
        return texts

    def overdue(self, now_s: float) -> str | None:
        """The text that has waited too long for its line end, if there is something to show."""
        if self.due_s() > now_s:
            return None
        if self._is_bar:
            self._bar_shown_s = now_s
        text = self._take()
        self._was_shown = True
        return text if text.strip() else None

    def due_s(self) -> float:
        """When that will be; infinity if nothing waits."""
        if not self._rest:
            return float("inf")
        return self._bar_shown_s + BAR_S if self._is_bar else self._heard_s + IDLE_S

    def end(self) -> str | None:
        """The rest at the end of the stream."""
        return self._take() if self._rest else None

    def _hold(self, part: bytes) -> None:
        self._rest += part
        if b"\r" in self._rest:
            drawn = self._rest.rstrip(b"\r")
            if (start := drawn.rfind(b"\r")) >= 0:
                del self._rest[: start + 1]
                self._is_bar, self._beyond = True, 0
            elif len(drawn) < len(self._rest):
                self._is_bar = True
        if (beyond := len(self._rest) - MAX_LINE_NBYTES) > 0:
            self._beyond += beyond
            del self._rest[MAX_LINE_NBYTES:]

    def _take(self) -> str:
        text = shown(self._rest)
        if self._beyond:
            text += f" … {self._beyond:,} bytes more"
        self._rest.clear()
        self._beyond = 0
        return text

    def _begin(self) -> None:
        self._rest.clear()
        self._beyond, self._is_bar, self._was_shown = 0, False, False
        self._bar_shown_s = float("-inf")


class LineBudget:
    """A limit of shown lines: a rate on average, and a burst of as many as the rate gives in ``burst_s`` seconds.

    Attributes:
        is_flooded: whether the last second had more lines than the rate, and some were not shown.
    """

    def __init__(self, burst_s: float) -> None:
        self.is_flooded = False
        self._burst_s = burst_s
        self._left: float | None = None
        self._counted_s = 0.0
        self._second_s = 0.0
        self._asked = self._refused = 0

    def admit(self, count: int, per_s: int, now_s: float, *, reserved: float = 0.0) -> int:
        """How many of ``count`` lines may be shown now; they are counted. ``reserved`` is the part for others."""
        most = per_s * self._burst_s
        if self._left is None:
            self._left = most
        else:
            self._left = min(self._left + max(now_s - self._counted_s, 0.0) * per_s, most)
        self._counted_s = now_s
        admitted = min(count, max(int(self._left - most * reserved), 0))
        self._left -= admitted
        self._watch(count, admitted, per_s, now_s)
        return admitted

    def _watch(self, count: int, admitted: int, per_s: int, now_s: float) -> None:
        if (passed_s := now_s - self._second_s) >= 1.0:
            self.is_flooded = self._refused > 0 and self._asked > per_s * passed_s
            self._asked, self._refused, self._second_s = 0, 0, now_s
        self._asked += count
        self._refused += count - admitted


MAX_HELD = 1000
"""How many lines are held back at most; the oldest come out when more come in."""

SHOWN_APART = 8
"""Up to this many lines that differ only in numbers are all shown; of more, the first represents all."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line as it is shown.

    Attributes:
        stream: 1 for the standard output, 2 for the standard error.
        source: label of the process that wrote it, or that wrote it first.
        text: the line without its end.
        alike: how many processes wrote it.
        meshes: the meshes of these processes.
        is_same: whether they wrote exactly this; if False, their lines differ in numbers.
    """

    stream: int
    source: str
    text: str
    alike: int = 1
    meshes: tuple[str, ...] = ()
    is_same: bool = True

    def prefix(self) -> str:
        """Who wrote it: ``trainers gpus=3``, ``trainers x16`` or ``trainers gpus=0 and 15 alike``."""
        if self.alike == 1:
            return self.source
        if not self.is_same:
            return f"{self.source} and {self.alike - 1} alike"
        more = f"+{len(self.meshes) - 3}" if len(self.meshes) > 3 else ""
        return f"{'+'.join(self.meshes[:3])}{more} x{self.alike}"


@dataclass(slots=True)
class _LineGroup:
    kind: tuple[int, str]
    until_s: float
    sources: dict[str, None] = field(default_factory=dict)
    """The processes in the order of their output."""
    texts: dict[str, list[str]] = field(default_factory=dict)
    """Which process wrote what, as long as there are few."""

    def add(self, source: str, text: str) -> None:
        self.sources[source] = None
        if text in self.texts or len(self.texts) <= SHOWN_APART:
            self.texts.setdefault(text, []).append(source)

    def lines(self) -> list[Line]:
        if len(self.texts) <= SHOWN_APART:
            return [self._line(text, sources) for text, sources in self.texts.items()]
        text, (source, *_) = next(iter(self.texts.items()))
        return [Line(self.kind[0], source, text, len(self.sources), is_same=False)]

    def _line(self, text: str, sources: list[str]) -> Line:
        meshes = () if len(sources) == 1 else tuple(dict.fromkeys(map(mesh_of, sources)))
        return Line(self.kind[0], sources[0], text, len(sources), meshes)


class Aggregator:
    """Holds lines back for ``window_s`` seconds at most (0: not at all) to find lines that several processes write.

    Lines are alike if they differ only in numbers and come from different processes. Repeated lines of one process stay
    repeated, and its lines stay in their order: a line never joins a group that will be shown before an earlier line of
    its own process.
    """

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._numbers = itertools.count()
        self._held: OrderedDict[int, _LineGroup] = OrderedDict()
        self._of_kind: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
        self._last_of: dict[tuple[int, str], int] = {}
        """Kept for each stream of each process: which of the two it wrote first is not known."""

    def add(self, stream: int, source: str, text: str, now_s: float) -> None:
        """Take a line."""
        kind = (stream, _NUMBERS.sub("#", text))
        alike = self._of_kind[kind]
        behind = bisect_right(alike, self._last_of.get((stream, source), -1))
        if behind < len(alike):
            number = alike[behind]
        else:
            number = next(self._numbers)
            alike.append(number)
            self._held[number] = _LineGroup(kind, now_s + self.window_s)
        self._held[number].add(source, text)
        self._last_of[stream, source] = number

    def due(self, now_s: float, speakers: int) -> list[Line]:
        """The lines that are due; a line that all ``speakers`` processes have written need not wait any longer."""
        lines: list[Line] = []
        while self._held:
            number, group = next(iter(self._held.items()))
            if now_s < group.until_s and len(group.sources) < speakers and len(self._held) <= MAX_HELD:
                break
            del self._held[number]
            alike = self._of_kind[group.kind]
            alike.pop(0)  # its number: groups of a kind come out in their order
            if not alike:
                del self._of_kind[group.kind]
            lines += group.lines()
        if not self._held:
            self._last_of.clear()
        return lines

    def next_s(self) -> float | None:
        """When the next line is due; None if nothing is held back."""
        return next(iter(self._held.values())).until_s if self._held else None
