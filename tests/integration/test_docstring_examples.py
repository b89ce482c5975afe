"""What the API reference shows as an example is a script that runs, and prints what its comments say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.example_process import ROOT

sys.path.insert(0, str(ROOT / "docs"))
from api_reference import Package, packages

PACKAGES = ("control", "dataplane", "torchstore", "tensor_engine")
BLOCK = re.compile(r"^Example:\n {4}```python\n(?P<code>.*?)^ {4}```$", re.MULTILINE | re.DOTALL)
PROMISE = re.compile(r"\bprint\(.*\)  # (?P<output>.+)$", re.MULTILINE)
ELSEWHERE = re.compile(r"^The example of `(?P<name>\w+)` shows one\.$", re.MULTILINE)
NEEDS_VLLM = "skipper.torchstore.adapters.vllm"
"""A package whose classes extend those of vLLM, which is not installed here: `make test-engines` runs them."""


@dataclass(frozen=True)
class Example:
    """The example of a class, a function, or a module."""

    name: str
    file: Path
    code: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT).as_posix()}:{self.name}"


def documented(path: Path) -> Iterator[tuple[str, str]]:
    """Names of a module that have a docstring, and that; the module itself has its own name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield path.stem, ast.get_docstring(tree) or ""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, ast.get_docstring(node) or ""


def examples() -> list[Example]:
    return [
        Example(name, path, textwrap.dedent(block["code"]))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for name, text in documented(path)
        for block in BLOCK.finditer(text)
    ]


EXAMPLES = examples()


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_an_example_runs_and_prints_what_it_says(example: Example) -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "example.py")
        script.write_text(example.code, encoding="utf-8")
        done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    for promise in PROMISE.finditer(example.code):
        assert promise["output"] in printed, done.stdout
        printed = printed[printed.index(promise["output"]) + 1 :]


def public_classes() -> dict[str, str]:
    """The docstring of each public class that is no exception and no protocol, by its name."""
    known = {package.name: package for package in packages()}
    public = {(_home(package, name, known), name) for package in known.values() for name in package.names}
    public = {(home, name) for home, name in public if not home.startswith(NEEDS_VLLM)}
    found: dict[str, str] = {}
    for module, name in public:
        file = ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body if file.exists() else ():
            if isinstance(node, ast.ClassDef) and node.name == name and not _is_left_out(node):
                found[name] = ast.get_docstring(node) or ""
    return found


def _home(package: Package, name: str, known: dict[str, Package]) -> str:
    """The module that defines a public name, whatever packages pass it on."""
    module = package.origins.get(name, package.name)
    while module in known and known[module].origins.get(name, module) != module:
        module = known[module].origins[name]
    return module


def _is_left_out(node: ast.ClassDef) -> bool:
    bases = [ast.unparse(base) for base in node.bases]
    return any(
        base.endswith("Error") or base.partition("[")[0] in ("Exception", "Protocol", "TypedDict") for base in bases
    )


def test_every_public_class_has_an_example_or_names_the_one_that_shows_it() -> None:
    own = {example.name: example.code for example in EXAMPLES}
    classes = public_classes()
    assert len(classes) > 100
    missing = []
    for name, text in classes.items():
        shown_by = ELSEWHERE.search(text)
        if name not in own and not (shown_by and re.search(rf"\b{name}\b", own.get(shown_by["name"], ""))):
            missing.append(name)
    assert missing == []


def test_every_example_in_a_docstring_is_one_that_runs() -> None:
    prompts = [
        f"{path.relative_to(ROOT)}: {name}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for name, text in documented(path)
        if re.search(r"^\s*>>> ", text, re.MULTILINE)
    ]
    assert prompts == []
