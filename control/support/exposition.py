"""Figures as text in Prometheus' format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Labels = tuple[tuple[str, str], ...]
Sample = tuple[str, Labels, float]
"""Metric, labels, value."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of Prometheus' text format, from its documentation of exposition formats."""


def exposition(families: Mapping[str, tuple[str, str]], samples: Iterable[Sample]) -> str:
    """Samples as text: all lines of a metric together, after its help and type.

    Args:
        families: kind and meaning of each metric, in the order in which they are to be shown. The parts of a histogram
            (``_bucket``, ``_sum``, ``_count``) belong to the metric without them.
        samples: samples in any order.

    Returns:
        Lines of text, version 0.0.4 of the format.
    """
    lines: dict[str, list[str]] = {family: [] for family in families}
    for name, labels, value in samples:
        family = name if name in lines else name.rpartition("_")[0]
        shown = ",".join(f'{label}="{_escape(text)}"' for label, text in labels)
        lines[family].append(f"{name}{{{shown}}} {value!r}")
    return "".join(
        f"# HELP {family} {meaning}\n# TYPE {family} {kind}\n" + "\n".join(lines[family]) + "\n"
        for family, (kind, meaning) in families.items()
        if lines[family]
    )


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
