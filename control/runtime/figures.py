"""`report_figures`: parts of a process add figures of theirs to what it says of itself when its status is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

Figures = Mapping[str, float]

_log = logging.getLogger("control")
_reporters: dict[str, Callable[[], Figures]] = {}


def report_figures(part: str, figures: Callable[[], Figures]) -> None:
    """Have figures of some part of this process shown in its status, and in the job's metrics.

    Args:
        part: its name; a second reporter of that name takes the place of the first.
        figures: called, on any thread, whenever somebody asks, and returns numbers by name; it must be quick.
    """
    _reporters[part] = figures


def figures_now() -> dict[str, dict[str, float]]:
    """The figures of all parts, by the part's name; without those whose function raises."""
    found = {}
    for part, figures in list(_reporters.items()):
        try:
            found[part] = {name: float(value) for name, value in figures().items()}
        except Exception:  # noqa: BLE001  (one part that fails must not hide the others)
            _log.exception("the figures of %s are not to be had", part)
    return found
