"""The tree's modules for another processor, compiled by this machine: an emulated compiler takes hours for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.roots import emulation


class CrossError(Exception):
    """The modules cannot be compiled for that processor; the message says what to do."""


def check(architecture: str) -> None:
    """See whether this machine has a compiler for a processor, named as Debian does.

    Raises:
        CrossError: it has none.
    """
    compiler = _compiler(architecture)
    if shutil.which(compiler) is None:
        package = compiler.removesuffix("-gcc").replace("_", "-")
        raise CrossError(f"{compiler} is missing: apt-get install gcc-{package}")


def install(tree: Path, root: Path, packages: Path, architecture: str) -> None:
    """Compile the modules of a tree within a root, and have the Python of this root find the tree, as ``pip -e`` would.

    The headers of Python and UCX are those of the root, and so are the flags and the modules' names: the Python that
    runs here reads the record of how the root's Python was built.

    Args:
        tree: what is compiled.
        root: the other processor's system, in which the tree lies.
        packages: the folder ``site-packages`` of an environment in the root; UCX is installed there.
        architecture: as Debian calls it.

    Raises:
        CrossError: they cannot be compiled.
    """
    python = packages.parent.name
    record = f"_sysconfigdata__linux_{_triple(architecture)}"
    beside = root / "skipper" / "cross"  # alone: what else is in its folder is of another Python than ours
    beside.mkdir(exist_ok=True)
    shutil.copy(root / "usr" / "lib" / python / f"{record}.py", beside)
    environment = {
        **os.environ,
        "_PYTHON_HOST_PLATFORM": f"linux-{emulation.MACHINES[architecture]}",
        "_PYTHON_SYSCONFIGDATA_NAME": record,
        "PYTHONPATH": str(beside),
        "CC": _compiler(architecture),
        "CFLAGS": f"--sysroot={root} -I{root}/usr/include/{python}",
        "UCX_HOME": str(packages / "libucx"),
    }
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "dist_info", f"--output-dir={packages}"]
    done = subprocess.run(command, cwd=tree, env=environment, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise CrossError(f"the modules cannot be compiled for {architecture}")
    inside = Path("/") / tree.relative_to(root) / "src"
    (packages / "skipper-tree.pth").write_text(f"{inside}\n", encoding="utf-8")


def _triple(architecture: str) -> str:
    return f"{emulation.MACHINES[architecture]}-linux-gnu"


def _compiler(architecture: str) -> str:
    return f"{_triple(architecture)}-gcc"
