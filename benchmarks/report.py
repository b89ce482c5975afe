"""The one shape in which every benchmark of this project prints its figures.

    {"schema_version": 1, "argv": [...], "environment": {...}, "config": {...},
     "results": [{"name": ..., "unit": ..., "value": <median>, "n": ..., "min": ..., "max": ...,
                  "p50": ..., "p99": ..., "reference": {"name": ..., "value": ...} or null,
                  "ratio": <value / reference.value> or null, ...the row's own parameters}],
     "errors": []}

All numbers of a row are in the row's ``unit``. ``ratio`` compares in that unit: for a rate more is
better, for a time less is. Rows add parameters of their own (``"backend"``, ``"op"``, ``"nbytes"``, ...)
beside the fixed keys, reports may add plain values beside the fixed top-level ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skipper.benchmarks.environment import gather_environment
from skipper.benchmarks.errors import ReportError
from skipper.benchmarks.schema import (
    REPORT_KEYS,
    RESULT_KEYS,
    RESULT_NUMBERS,
    SCHEMA_VERSION,
    Scalar,
    report_problems,
    result_problems,
)
from skipper.benchmarks.statistics import median_interval, stretches, summarize

__all__ = ["Reference", "Report", "Result", "Scalar"]


@dataclass(frozen=True, slots=True)
class Reference:
    """What a figure is held against: measured in the same run, given in the same unit."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Result:
    """One row: order statistics of one measured quantity.

    Attributes:
        name: What was measured, such as ``read_bandwidth``.
        unit: Unit of every number of the row: ``GB/s`` (decimal), ``us``, ``s``, ...
        value: The median, equal to ``p50``.
        n: How many samples there were.
        min: Smallest sample, whether that is the best (a time) or the worst (a rate).
        max: Largest sample.
        p50: Median, nearest rank.
        p99: 99th percentile, nearest rank. For a rate this is the fast end.
        reference: What to hold the figure against, if anything.
        parameters: What tells this row from the others: sizes, backend, operation. Plain values.
    """

    name: str
    unit: str
    value: float
    n: int
    min: float
    max: float
    p50: float
    p99: float
    reference: Reference | None = None
    parameters: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = list(result_problems(self.to_dict()))
        taken = RESULT_KEYS & set(self.parameters)
        if taken:
            problems.append(f"parameters {sorted(taken)} would hide the row's own keys")
        if problems:
            raise ReportError(f"result {self.name!r}: " + "; ".join(problems))

    @classmethod
    def from_samples(
        cls,
        name: str,
        unit: str,
        samples: Sequence[float],
        *,
        n: int | None = None,
        reference: Reference | None = None,
        parameters: Mapping[str, Scalar] | None = None,
    ) -> Result:
        """Summarize samples, given in ``unit``.

        With six and more of them the row also gets ``p50_low`` and ``p50_high``, the 95% interval of its median.

        Args:
            name: What was measured.
            unit: Its unit.
            samples: At least one, in the order in which they were taken: the interval is that of stretches of them.
            n: How many samples were taken, where ``samples`` holds only an evenly spaced part of them.
            reference: What to hold the median against.
            parameters: The row's own parameters.

        Raises:
            ValueError: No samples. `ReportError`, itself a ``ValueError``, for samples that are not finite.
        """
        summary = summarize(samples)
        interval = median_interval(stretches(samples))
        own: dict[str, Scalar] = {} if interval is None else {"p50_low": interval[0], "p50_high": interval[1]}
        return cls(
            name=name,
            unit=unit,
            value=summary.p50,
            n=summary.n if n is None else n,
            min=summary.min,
            max=summary.max,
            p50=summary.p50,
            p99=summary.p99,
            reference=reference,
            parameters={**(parameters or {}), **own},
        )

    @classmethod
    def single(
        cls,
        name: str,
        unit: str,
        value: float,
        *,
        reference: Reference | None = None,
        parameters: Mapping[str, Scalar] | None = None,
    ) -> Result:
        """A figure that was taken once."""
        return cls.from_samples(name, unit, [value], reference=reference, parameters=parameters)

    @property
    def ratio(self) -> float | None:
        """``value / reference.value``, or ``None`` where there is nothing to divide by."""
        if self.reference is None or self.reference.value == 0:
            return None
        return self.value / self.reference.value

    def to_dict(self) -> dict[str, Any]:
        """The row as plain JSON values."""
        reference = None
        if self.reference is not None:
            reference = {"name": self.reference.name, "value": self.reference.value}
        return {
            "name": self.name,
            "unit": self.unit,
            **{key: getattr(self, key) for key in RESULT_NUMBERS},
            "reference": reference,
            "ratio": self.ratio,
            **self.parameters,
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Result:
        """Read a row back.

        Raises:
            ReportError: Keys missing or of the wrong type.
        """
        problems = list(result_problems(row))
        if problems:
            raise ReportError("; ".join(problems))
        reference = row["reference"]
        return cls(
            name=row["name"],
            unit=row["unit"],
            **{key: row[key] for key in RESULT_NUMBERS},
            reference=None if reference is None else Reference(reference["name"], reference["value"]),
            parameters={key: value for key, value in row.items() if key not in RESULT_KEYS},
        )


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one run of a benchmark has to say.

    Attributes:
        argv: The command as one would type it; no absolute paths, no secrets.
        config: What the run did, defaults filled in.
        results: The rows, in the order in which they were measured.
        errors: One sentence for each thing that failed; empty when the run is whole.
        environment: Where it ran; gathered when not given.
        extra: Further plain top-level values, such as a count that a script's reader looks for.
    """

    argv: Sequence[str]
    config: Mapping[str, Any]
    results: Sequence[Result]
    errors: Sequence[str] = ()
    environment: Mapping[str, Any] = field(default_factory=gather_environment)
    extra: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        taken = REPORT_KEYS & set(self.extra)
        if taken:
            raise ReportError(f"extra values {sorted(taken)} would hide the report's own keys")

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "argv": list(self.argv),
            "environment": dict(self.environment),
            "config": dict(self.config),
            "results": [result.to_dict() for result in self.results],
            "errors": list(self.errors),
            **self.extra,
        }

    def to_json(self) -> str:
        """The report as an indented JSON document that ends with a newline."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Report:
        """Read a report back.

        Raises:
            ReportError: ``document`` does not have the shape; the message lists every departure.
        """
        problems = report_problems(document)
        if problems:
            raise ReportError("not a benchmark report: " + "; ".join(problems))
        return cls(
            argv=tuple(document["argv"]),
            config=document["config"],
            results=tuple(Result.from_dict(row) for row in document["results"]),
            errors=tuple(document["errors"]),
            environment=document["environment"],
            extra={key: value for key, value in document.items() if key not in REPORT_KEYS},
        )

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read a report back from its JSON text.

        Raises:
            ReportError: Not JSON, or not of the shape.
        """
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise ReportError(f"not JSON: {error}") from error
        if not isinstance(document, dict):
            raise ReportError("not a benchmark report: the document is no object")
        return cls.from_dict(document)
