"""``skipper bw compare``: which rows belong together, and what may be said of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from skipper.benchmarks.bandwidth.command import main
from skipper.benchmarks.bandwidth.compare import compare, matches
from skipper.benchmarks.report import Reference, Report, Result

MACHINE = {"cpu": "One", "cores_usable": 2, "memory_nbytes": 1 << 34, "machine": "x86_64", "kernel": "Linux 6.1"}


def row(value: float, *, spread: float | None = 0.01, name: str = "read_bandwidth", **parameters: Any) -> Result:
    """A row of medians within ``spread`` of ``value``, beside a memcpy of 20."""
    ends: dict[str, Any] = {"p50_low": None, "p50_high": None, "ratio_low": None, "ratio_high": None}
    if spread is not None:
        low, high = value * (1 - spread), value * (1 + spread)
        ends = {"p50_low": low, "p50_high": high, "ratio_low": low / 20, "ratio_high": high / 20}
    value = float(value)  # whole numbers are parameters, fractions are measured
    unit = "us" if "latency" in name else "GB/s"
    own = {"backend": "shm", "size": 4096, "batch": 1, "p99_us": value, **ends, **parameters}
    return Result.single(name, unit, value, reference=Reference("memcpy", 20.0), parameters=own)


def report(*rows: Result, errors: tuple[str, ...] = (), **environment: Any) -> Report:
    return Report(argv=["x"], config={}, results=rows, errors=errors, environment={**MACHINE, **environment})


def verdict(before: Result, after: Result, **options: Any) -> tuple[str, float]:
    settings = {"relative": False, "tolerance": 0.05, **options}
    (found,) = compare(report(before), report(after), **settings)
    return found.verdict, round(found.speedup, 3)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (row(10), row(12), ("faster", 1.2)),
        (row(10), row(8), ("slower", 0.8)),
        (row(10), row(10.4), ("no difference", 1.04)),
        (row(10, spread=0.2), row(12, spread=0.2), ("no difference", 1.2)),
        (row(10, spread=None), row(20), ("unclear", 2.0)),
        (row(10, name="read_latency"), row(8, name="read_latency"), ("faster", 1.25)),
        (row(8, name="read_latency"), row(10, name="read_latency"), ("slower", 0.8)),
        (row(10), row(20, backend="ucx"), ("faster", 2.0)),
    ],
)
def test_a_verdict_needs_an_interval_and_more_than_the_tolerance(
    before: Result, after: Result, expected: tuple[str, float]
) -> None:
    assert verdict(before, after) == expected


def test_the_interval_of_a_time_is_turned_around_with_it() -> None:
    before, after = row(10, name="read_latency"), row(8, name="read_latency")
    (found,) = compare(report(before), report(after), relative=False, tolerance=0.05)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 1.25 < found.high
    assert found.low == pytest.approx(9.9 / 8.08)


def test_relative_rows_are_compared_by_their_ratios() -> None:
    # Twice as fast, on a machine whose memcpy is, too.
    after = row(20)
    doubled = Result.single(
        "read_bandwidth", "GB/s", 20, reference=Reference("memcpy", 40.0), parameters=dict(after.parameters)
    )
    assert verdict(row(10), doubled)[1] == 2.0
    assert verdict(row(10), doubled, relative=True)[1] == 1.0


def test_rows_pair_up_by_what_they_measured() -> None:
    before = [row(1, size=4096), row(2, size=8192), row(3, batch=5), row(4, name="write_bandwidth")]
    after = [row(9, batch=5), row(8, size=8192, verified=True, segments=3), row(7, size=4096, p99_us=0.5)]
    assert [(old.value, new.value) for old, new in matches(before, after)] == [(1, 7), (2, 8), (3, 9)]


def test_another_backend_pairs_up_only_where_there_is_no_doubt() -> None:
    assert len(matches([row(1)], [row(2, backend="ucx"), row(3, backend="verbs")])) == 0
    pairs = matches([row(1), row(2, backend="ucx")], [row(3, backend="ucx"), row(4, backend="verbs")])
    assert [(old.value, new.value) for old, new in pairs] == [(1, 4), (2, 3)]


def files(tmp_path: Path, before: Report, after: Report) -> list[str]:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, content in zip(paths, (before, after), strict=True):
        path.write_text(content.to_json())
    return ["compare", *map(str, paths)]


def test_the_command_says_what_changed_and_exits_for_ci(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = files(tmp_path, report(row(10)), report(row(8), errors=("interrupted",), cpu="Two"))
    assert main([*argv, "--json", "-"]) == 0
    captured = capsys.readouterr()
    (found,) = json.loads(captured.out)["results"]
    assert (found["verdict"], found["before"], found["after"], found["unit"]) == ("slower", 10, 8, "speedup")
    assert Report.from_json(captured.out).results[0].value == 0.8
    assert "cpu One -> Two" in captured.err
    assert "B was measured incomplete: interrupted" in captured.err
    assert "read_bandwidth 4K" in captured.err, "the table goes to standard error"

    assert main([*argv, "--fail-below", "0.75"]) == 0
    assert main([*argv, "--fail-below", "0.9"]) == 4
    assert "read_bandwidth 4K at 0.800" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after", "flags", "says"),
    [
        (report(row(1)), report(row(1, size=9)), [], "no row in common"),
        (report(row(1, spread=None)), report(row(1)), ["--fail-below", "0.9"], "enough samples"),
        (report(row(1)), report(row(1)), ["--fail-below", "x"], "positive"),
    ],
)
def test_what_cannot_be_compared_is_a_usage_error(
    before: Report, after: Report, flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*files(tmp_path, before, after), *flags]) == 2
    assert says in capsys.readouterr().err


def test_a_file_that_is_no_report_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert main(["compare", str(tmp_path / "x.json"), str(tmp_path / "x.json")]) == 2
    assert "not a benchmark report" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "none"), str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err
