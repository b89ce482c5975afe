import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from skipper.commandline import number, output_path, port_number, seconds, whole, write_json


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (whole(1, 9), "9", 9),
        (number(), "0.5", 0.5),
        (number(zero=True), "0", 0.0),
        (seconds, "1e3", 1000.0),
        (port_number, "0", 0),
        (port_number, "65535", 65535),
        (output_path, "-", "-"),
    ],
)
def test_values_are_taken(parse: Callable[[str], object], text: str, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (whole(1, 9), ["0", "10", "-1", "1.5", "one", ""]),
        (number(), ["0", "-1", "nan", "inf", "lots"]),
        (seconds, ["0", "-1", "nan", "inf", "soon"]),
        (port_number, ["-1", "65536", "http", ""]),
        (output_path, ["/", "/no/such/folder/x"]),
    ],
)
def test_others_are_refused_in_words(parse: Callable[[str], object], texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError, match=r"\w+ \w+"):
            parse(text)


def test_json_goes_to_a_file_or_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json({"a": 1}, None)
    write_json({"a": 1}, str(tmp_path / "a.json"))
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}
    assert capsys.readouterr().out == ""
    write_json({"a": 1}, "-")
    assert json.loads(capsys.readouterr().out) == {"a": 1}
