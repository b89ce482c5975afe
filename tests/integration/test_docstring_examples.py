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

PACKAGES = ("control", "dataplane", "torchstore", "tensor_engine")
BLOCK = re.compile(r"^Example:\n {4}```python\n(?P<code>.*?)^ {4}```$", re.MULTILINE | re.DOTALL)
PROMISE = re.compile(r"\bprint\(.*\)  # (?P<output>.+)$", re.MULTILINE)
MOST_USED = {
    "Actor",
    "Endpoint",
    "HostMesh",
    "ProcMesh",
    "ActorMesh",
    "ValueMesh",
    "Future",
    "Extent",
    "Point",
    "Shape",
    "Accumulator",
    "ResponseStream",
    "Channel",
    "Port",
    "PortReceiver",
    "MeshFailure",
    "LocalJob",
    "RecoveryPolicy",
    "Service",
    "Session",
    "ActorServer",
    "RpcClient",
    "FixedResolver",
    "RDMABuffer",
    "RDMAAction",
    "RemoteLayout",
    "Operation",
    "TensorSlice",
    "Part",
    "Stack",
    "Origin",
    "HostStrategy",
    "BlockFP8",
    "SyncRecord",
    "Certificate",
    "Tensor",
    "Stream",
    "OpaqueObject",
    "OpaqueModule",
    "RemoteFunction",
    "CompiledFunction",
}


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


def test_the_classes_that_people_use_most_have_an_example() -> None:
    assert MOST_USED - {example.name for example in EXAMPLES} == set()


def test_every_example_in_a_docstring_is_one_that_runs() -> None:
    prompts = [
        f"{path.relative_to(ROOT)}: {name}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for name, text in documented(path)
        if re.search(r"^\s*>>> ", text, re.MULTILINE)
    ]
    assert prompts == []
