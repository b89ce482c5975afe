"""The page of errors names each public error once, and nothing else."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
ROWS = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
PACKAGES = ("skipper.control", "skipper.dataplane", "skipper.torchstore", "skipper.tensor_engine")


def public_errors(package: str) -> set[str]:
    module = importlib.import_module(package)
    found = {name: getattr(module, name) for name in module.__all__}
    return {name for name, value in found.items() if inspect.isclass(value) and issubclass(value, BaseException)}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_error_is_explained(package: str) -> None:
    errors = public_errors(package)
    assert len(errors) >= 9
    assert errors <= {name for name, *_ in ROWS}


def test_every_row_is_a_public_error_that_is_explained_once() -> None:
    names = [name for name, *_ in ROWS]
    assert sorted(names) == sorted(set().union(*map(public_errors, PACKAGES)))
