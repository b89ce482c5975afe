import csv
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipper.benchmarks.environment import gather_environment
from skipper.benchmarks.errors import ReportError, UsageError
from skipper.benchmarks.output import check_writable, plot_rates, significant, write_csv, write_json
from skipper.benchmarks.report import Reference, Report, Result, report_problems

numbers = st.floats(min_value=1e-6, max_value=1e12)
scalars = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=10) | numbers
fixed = {"name", "unit", "value", "n", "min", "max", "p50", "p99", "reference", "ratio"}
results = st.builds(
    Result.from_samples,
    st.text(min_size=1, max_size=20),
    st.sampled_from(["GB/s", "us", "s"]),
    st.lists(numbers, min_size=1, max_size=50),
    reference=st.none() | st.builds(Reference, st.text(max_size=10), numbers),
    parameters=st.dictionaries(
        st.text(min_size=1, max_size=10).filter(lambda key: key not in fixed), scalars, max_size=4
    ),
)
reports = st.builds(
    Report,
    argv=st.lists(st.text(max_size=10), max_size=4).map(tuple),
    config=st.dictionaries(st.text(max_size=10), scalars, max_size=4),
    results=st.lists(results, max_size=4).map(tuple),
    errors=st.lists(st.text(max_size=20), max_size=2).map(tuple),
    environment=st.just({"cores": 2}),
    extra=st.just({"mismatched_tensors": 0}),
)


def example(**changes: Any) -> Result:
    values: dict[str, Any] = {
        "reference": Reference("memcpy", 10.0),
        "parameters": {"backend": "shm", "op": "read", "nbytes": 4096},
        **changes,
    }
    return Result.from_samples("read_bandwidth", "GB/s", [8.0, 9.0, 9.5], **values)


@given(reports)
def test_a_report_reads_back_as_itself(report: Report) -> None:
    document = json.loads(report.to_json())
    assert report_problems(document) == []
    assert Report.from_dict(document).to_dict() == document


def test_the_shape_is_the_documented_one() -> None:
    document = Report(argv=["skipper", "bw"], config={"op": "read"}, results=[example()]).to_dict()
    assert list(document) == ["schema_version", "argv", "environment", "config", "results", "errors"]
    assert document["schema_version"] == 1
    assert document["results"] == [
        {
            "name": "read_bandwidth",
            "unit": "GB/s",
            "value": 9.0,
            "n": 3,
            "min": 8.0,
            "max": 9.5,
            "p50": 9.0,
            "p99": 9.5,
            "reference": {"name": "memcpy", "value": 10.0},
            "ratio": 0.9,
            "backend": "shm",
            "op": "read",
            "nbytes": 4096,
        }
    ]


def test_a_row_without_a_reference_has_no_ratio() -> None:
    assert example(reference=None).ratio is None
    assert example(reference=Reference("nothing", 0.0)).ratio is None


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"argv": [1]}, "argv"),
        ({"errors": "none"}, "errors"),
        ({"environment": None}, "environment"),
        ({"results": {}}, "results"),
        ({"results": [7]}, "results\\[0\\]"),
    ],
)
def test_a_departure_of_the_report_is_named(change: dict[str, Any], complaint: str) -> None:
    document = {**Report(argv=[], config={}, results=[example()]).to_dict(), **change}
    with pytest.raises(ReportError, match=complaint):
        Report.from_dict(document)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": ""}, "name"),
        ({"unit": None}, "unit"),
        ({"value": math.nan}, "value"),
        ({"value": 9.25}, "median"),
        ({"n": 0}, "n must"),
        ({"n": True}, "n must"),
        ({"min": 9.1}, "min <= p50"),
        ({"p99": 99.0}, "min <= p50"),
        ({"ratio": None}, "ratio"),
        ({"ratio": 0.8}, "ratio"),
        ({"reference": None}, "ratio needs"),
        ({"reference": {"name": "memcpy"}}, "reference"),
        ({"nbytes": [1]}, "nbytes"),
    ],
)
def test_a_departure_of_a_row_is_named(change: dict[str, Any], complaint: str) -> None:
    document = Report(argv=[], config={}, results=[example()]).to_dict()
    document["results"][0].update(change)
    with pytest.raises(ReportError, match=complaint):
        Report.from_dict(document)


def test_every_departure_is_named_at_once() -> None:
    assert len(report_problems({})) == 6


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(ReportError, match="not JSON"):
        Report.from_json("{")
    with pytest.raises(ReportError, match="no object"):
        Report.from_json("[]")


def test_parameters_cannot_hide_the_rows_own_keys() -> None:
    with pytest.raises(ReportError, match="value"):
        example(parameters={"value": 1.0})
    with pytest.raises(ReportError, match="results"):
        Report(argv=[], config={}, results=[], extra={"results": 1})


def test_samples_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ReportError, match="finite"):
        Result.single("x", "us", math.inf)


def test_the_environment_says_what_ran_where_and_no_names() -> None:
    import platform

    environment = gather_environment()
    assert {"cpu", "cores", "kernel", "python", "torch", "ucx", "skipper", "commit"} <= environment.keys()
    assert environment["python"] == platform.python_version()
    text = json.dumps(environment)
    assert str(Path.home()) not in text
    assert platform.node() not in [environment[key] for key in environment]


def test_gathering_the_environment_does_not_import_torch() -> None:
    script = (
        "import sys\nfrom skipper import benchmarks\n"
        "benchmarks.report.gather_environment()\nsys.exit('torch' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_json_is_written_to_a_file_or_alone_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(argv=["x"], config={}, results=[example()])
    write_json(report, str(tmp_path / "report.json"))
    write_json(report, "-")
    assert capsys.readouterr().out == (tmp_path / "report.json").read_text() == report.to_json()


def test_csv_has_a_line_for_each_row_and_a_column_for_each_parameter(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    write_csv([example(), example(reference=None, parameters={"mem": "host"})], str(path))
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["value"], first["reference_name"], first["nbytes"], first["mem"]) == (
        "9.0",
        "memcpy",
        "4096",
        "",
    )
    assert (second["reference_name"], second["ratio"], second["mem"]) == ("", "", "host")


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "rates.png"
    rows = [example(parameters={"nbytes": nbytes}) for nbytes in (1 << 20, 4096)]
    plot_rates([*rows, Result.single("first_use", "us", 5.0)], str(path), title="read")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_rates([Result.single("first_use", "us", 5.0)], str(path), title="read")


def test_a_place_that_cannot_be_written_is_found_out_early(tmp_path: Path) -> None:
    check_writable(None)
    check_writable("-")
    check_writable(str(tmp_path / "new.json"))
    with pytest.raises(UsageError, match="folder"):
        check_writable(str(tmp_path))
    with pytest.raises(UsageError, match="there is no folder"):
        check_writable(str(tmp_path / "missing" / "new.json"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.000012346, "0.00001235"),
        (0.5, "0.5"),
        (1.0, "1.000"),
        (12.3456, "12.35"),
        (1234.5, "1234"),
        (123456, "123456"),
    ],
)
def test_figures_print_without_exponents(value: float, text: str) -> None:
    assert significant(value) == text
