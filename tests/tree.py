"""The tree, to be built and tested elsewhere: a copy as git would take it, and the tests that stand for all."""

import os
import shutil
import subprocess
from collections.abc import Container, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = (
    "tests/trust",
    "tests/conformance",
    "tests/dataplane",
    "tests/control/model",
    "tests/control/support",
    "tests/control/wire",
    "tests/control/runtime",
    "tests/control/api",
    "tests/tensor_engine",
    "tests/torchstore",
)
"""What each layer promises, without the machines, engines and tools around it."""


def copy_tree(target: Path) -> None:
    """Copy what git knows or would take, where it has changed: setuptools compiles what is newer than its module."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    every = [name for name in listed.stdout.decode().split("\0") if name]
    for name in every:  # the packages are relative links to the folders at the top
        if (ROOT / name).is_symlink() and not (target / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).symlink_to(os.readlink(ROOT / name))
    names = [name for name in every if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]
    for name in names:
        copy_changed(ROOT / name, target / name)
    kept = {target / name for name in names}
    for old in target.rglob("*.py"):  # of a file that is gone; a test of it would still run
        if old not in kept:
            old.unlink()


def copy_changed(source: Path, copy: Path) -> None:
    """Copy a file unless the copy is the same."""
    if not copy.exists() or copy.read_bytes() != source.read_bytes():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)


def chosen(arguments: Sequence[str], instead: Sequence[str]) -> list[str]:
    """Arguments for pytest: those that were given, behind the tests that run where these name none."""
    names_tests = any((ROOT / each.partition("::")[0]).exists() for each in arguments)
    return [*(() if names_tests else instead), *arguments]


def pins_beside(names: Container[str]) -> list[str]:
    """The lines of `constraints.txt` without those of some packages."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#") and line.partition("==")[0] not in names]
