"""`report_figures`: parts of a process add figures of theirs to what it says of itself when its status is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from skipper.control.runtime.reporters import Reporters

Figures = Mapping[str, float]

_reporters: Reporters[dict[str, float]] = Reporters("the figures of %s are not to be had")


def report_figures(part: str, figures: Callable[[], Figures]) -> None:
    """Have figures of some part of this process shown in its status, and in the job's metrics.

    Args:
        part: its name; a second reporter of that name takes the place of the first.
        figures: called, on any thread, whenever somebody asks, and returns numbers by name; it must be quick.
    """
    _reporters.set(part, lambda: {name: float(value) for name, value in figures().items()})


def figures_now() -> dict[str, dict[str, float]]:
    """The figures of all parts, by the part's name; without those whose function raises."""
    return dict(_reporters.ask())
