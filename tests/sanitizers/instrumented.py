"""A copy of the tree whose compiled modules are built with a sanitizer, and the libraries of the compiler's."""

import os
import subprocess
import sys
from pathlib import Path

from tests.tree import copy_tree

_BARE_CMA = Path(__file__).parent / "bare_cma.c"


def build(tree: Path, sanitizer: str) -> dict[str, str]:
    """Copy the tree and compile what has changed there; the environment in which its Python code is found.

    Args:
        tree: The folder of the copy.
        sanitizer: What the compiler and the linker are to be told.
    """
    copy_tree(tree)
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}:{tree}"}
    flags = f"{sanitizer} -fno-omit-frame-pointer -g1 -O1"
    building = {**environment, "CFLAGS": flags, "LDFLAGS": sanitizer}
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=tree, env=building, check=True
    )
    return environment


def run_planted(tree: Path, script: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a script that does what the sanitizer is to report."""
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


def bare_cma(tree: Path) -> str:
    """Build what hides the sanitizers' `process_vm_readv`, in the copy of the tree; see there."""
    built = tree / "bare_cma.so"
    command = [compiler(), "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(built), str(_BARE_CMA)]
    subprocess.run(command, check=True)
    return str(built)


def library(name: str) -> str:
    """The path of one of the compiler's libraries."""
    found = subprocess.run([compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = found.stdout.strip()
    if not os.path.isabs(path):
        sys.exit(f"{compiler()} has no {name}: install its sanitizers (Debian: apt-get install libgcc-12-dev)")
    return path


def compiler() -> str:
    """The C compiler's name."""
    return os.environ.get("CC", "gcc")
