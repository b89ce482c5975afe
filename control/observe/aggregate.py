"""Lines that several processes say alike are shown once: ``[16 similar lines]``. Pure: time is an argument."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from dataclasses import dataclass

MAX_HELD = 1000
"""So many lines are held back at most; the oldest come out when more come in."""

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
    """Holds lines back for a moment, to see who else says so.

    Lines are alike where they differ in numbers only, and come from different processes. What one process repeats
    stays repeated, and its lines stay in their order: a line is never shown together with one that stands before
    something that its process has said earlier.

    Args:
        window_s: how long a line is held back at most; 0 for not at all.
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
        """The lines that are to be shown by now.

        Args:
            now_s: the time.
            speakers: how many processes there are; what all of them have said waits for nobody.
        """
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
