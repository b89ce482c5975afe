"""The one shape in which every benchmark of this project prints its figures.

    {"schema_version": 1, "argv": [...], "environment": {...}, "config": {...},
     "results": [{"name": ..., "unit": ..., "value": <median>, "n": ..., "min": ..., "max": ...,
                  "p50": ..., "p99": ..., "reference": {"name": ..., "value": ...} or null,
                  "ratio": <value / reference.value> or null, ...the row's own parameters}],
     "errors": []}

All numbers of a row are in the row's ``unit``. ``ratio`` compares in that unit: for a rate, higher
is better; for a time, lower. Rows add parameters of their own (``"backend"``, ``"op"``, ``"nbytes"``, ...)
to the fixed keys; reports may add plain values to the fixed top-level ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeGuard

from skipper.benchmarks.environment import gather_environment
from skipper.benchmarks.errors import ReportError
from skipper.benchmarks.statistics import median_interval, stretches, summarize

__all__ = ["Reference", "Report", "Result", "Scalar", "latency", "rate", "report_problems"]

SCHEMA_VERSION = 1

Scalar = str | int | float | bool | None
"""What a row's own parameter may be."""

RESULT_NUMBERS = ("value", "n", "min", "max", "p50", "p99")
RESULT_KEYS = frozenset({"name", "unit", *RESULT_NUMBERS, "reference", "ratio"})
REPORT_KEYS = frozenset({"schema_version", "argv", "environment", "config", "results", "errors"})


@dataclass(frozen=True, slots=True)
class Reference:
    """What a figure is compared with: measured in the same run, and given in the same unit."""

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
        reference: What the figure is compared with, if anything.
        parameters: What distinguishes this row from the others: sizes, backend, operation. Plain values.
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
            reference: What to compare the median with.
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
        """A row for a figure that was measured once."""
        return cls.from_samples(name, unit, [value], reference=reference, parameters=parameters)

    def as_reference(self) -> Reference:
        """This row as the reference of another row."""
        return Reference(self.name, self.value)

    @property
    def ratio(self) -> float | None:
        """``value / reference.value``, or ``None`` where there is nothing to divide by."""
        if self.reference is None or self.reference.value == 0:
            return None
        return self.value / self.reference.value

    def to_dict(self) -> dict[str, Any]:
        """The row as plain JSON values."""
        return {
            "name": self.name,
            "unit": self.unit,
            **{key: getattr(self, key) for key in RESULT_NUMBERS},
            "reference": None if self.reference is None else asdict(self.reference),
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


def latency(
    name: str,
    durations_ns: Sequence[float],
    beside: Result | None = None,
    parameters: Mapping[str, Scalar] | None = None,
) -> Result:
    """A row of times in µs, with the row ``beside`` as its reference."""
    samples = [ns / 1e3 for ns in durations_ns]
    reference = None if beside is None else beside.as_reference()
    return Result.from_samples(name, "us", samples, reference=reference, parameters=parameters)


def rate(
    name: str,
    durations_ns: Sequence[float],
    amount: int,
    beside: Result | None = None,
    *,
    unit: str = "1/s",
    parameters: Mapping[str, Scalar] | None = None,
) -> Result:
    """A row of ``amount`` per second, or per ns where the unit is GB/s; the percentiles are those of the rate."""
    per = 1.0 if unit == "GB/s" else 1e9
    samples = [amount * per / ns for ns in durations_ns]
    reference = None if beside is None else beside.as_reference()
    return Result.from_samples(name, unit, samples, reference=reference, parameters=parameters)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one run of a benchmark reports.

    Attributes:
        argv: The command as a user would type it; no absolute paths, no secrets.
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
            ReportError: ``document`` does not have the shape; the message lists every problem.
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


def report_problems(document: Mapping[str, Any]) -> list[str]:
    """Everything that is wrong with ``document``, from any program, as a report; empty if it is one."""
    problems = [
        f"{key} must be an object" for key in ("environment", "config") if not isinstance(document.get(key), dict)
    ]
    if document.get("schema_version") != SCHEMA_VERSION:
        problems.append(f"schema_version is {document.get('schema_version')!r}, not {SCHEMA_VERSION}")
    problems += [
        f"{key} must be an array of strings"
        for key in ("argv", "errors")
        if not isinstance(document.get(key), list) or not all(isinstance(item, str) for item in document[key])
    ]
    results = document.get("results")
    if isinstance(results, list):
        for index, row in enumerate(results):
            problems += [f"results[{index}]: {problem}" for problem in result_problems(row)]
    else:
        problems.append("results must be an array")
    return problems


def result_problems(row: object) -> Iterator[str]:
    """Everything that is wrong with ``row`` as an entry of ``results``."""
    if not isinstance(row, Mapping):
        yield "not an object"
        return
    for key in ("name", "unit"):
        if not isinstance(row.get(key), str) or not row[key]:
            yield f"{key} must be a non-empty string"
    wrong = [key for key in RESULT_NUMBERS if not _is_number(row.get(key))]
    if wrong:
        yield f"{', '.join(wrong)} must be finite numbers"
    else:
        if not isinstance(row["n"], int) or row["n"] < 1:
            yield f"n must be a whole number of samples, at least one, not {row['n']}"
        if not row["min"] <= row["p50"] <= row["p99"] <= row["max"]:
            yield "min <= p50 <= p99 <= max does not hold"
        if row["value"] != row["p50"]:
            yield "value must be the median, p50"
        yield from _reference_problems(row["value"], row.get("reference"), row.get("ratio"))
    for key in row.keys() - RESULT_KEYS:
        if not isinstance(row[key], Scalar) or (isinstance(row[key], float) and not math.isfinite(row[key])):
            yield f"parameter {key} must be a plain value"


def _reference_problems(value: float, reference: object, ratio: object) -> Iterator[str]:
    if reference is None:
        if ratio is not None:
            yield "a ratio needs a reference"
        return
    named = isinstance(reference, Mapping) and isinstance(reference.get("name"), str)
    if not isinstance(reference, Mapping) or not named or not _is_number(reference.get("value")):
        yield "reference must be null or {name, value}"
        return
    if reference["value"] == 0:
        if ratio is not None:
            yield "there is no ratio to zero"
    elif not _is_number(ratio) or not math.isclose(ratio, value / reference["value"], rel_tol=1e-9):
        yield "ratio must be value / reference.value"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
