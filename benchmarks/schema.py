"""What makes a JSON document a benchmark report; `report` says what its parts mean.

Pure, and needs nothing but the document, so that a report written by any program can be checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

__all__ = [
    "REPORT_KEYS",
    "RESULT_KEYS",
    "RESULT_NUMBERS",
    "SCHEMA_VERSION",
    "Scalar",
    "report_problems",
    "result_problems",
]

SCHEMA_VERSION = 1

Scalar = str | int | float | bool | None
"""What a row's own parameter may be."""

RESULT_NUMBERS = ("value", "n", "min", "max", "p50", "p99")
RESULT_KEYS = frozenset({"name", "unit", *RESULT_NUMBERS, "reference", "ratio"})
REPORT_KEYS = frozenset({"schema_version", "argv", "environment", "config", "results", "errors"})


def report_problems(document: Mapping[str, Any]) -> list[str]:
    """Say everything that keeps ``document`` from being a report; an empty list means that it is one."""
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
    """Say everything that keeps ``row`` from being one entry of ``results``."""
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
