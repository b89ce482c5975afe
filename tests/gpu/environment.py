"""An environment around the Python of a machine with a GPU, made without a network.

torch, numpy and CUDA are those of the machine. What is missing, or too old for our bounds, comes from a folder of
wheels, which also holds pip: the machine needs neither that nor ensurepip. The extensions are compiled from the
checkout, with the compiler and Cython that are there.
"""

import importlib.util
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.gpu.errors import GpuRunError
from tests.gpu.wheels import requirements
from tests.tree import ROOT


def make(folder: Path, wheels: Path, *, cuda: str) -> tuple[Path, list[str]]:
    """Make it, or bring it up to date: a second call costs seconds.

    Args:
        folder: Where it lies.
        wheels: Filled by `wheels.download`.
        cuda: The major version that UCX is for.

    Returns:
        Its Python, and the names with versions of what was installed from the wheels.

    Raises:
        GpuRunError: Something is missing; all that is, in one message.
    """
    _require(wheels)
    python = folder / "bin" / "python"
    if not python.exists():
        venv.EnvBuilder(clear=True, symlinks=True).create(folder)
        _look_into_base(folder)
    (pip,) = wheels.glob("pip-*.whl")
    install = [str(python), str(pip / "pip"), "install", "--disable-pip-version-check", "--no-index"]
    said = _run([*install, f"--find-links={wheels}", *requirements(cuda)], "what is missing could not be installed")
    # Isolation would ask an index for setuptools; what the build needs is in the environment.
    _run([*install, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)], "the checkout could not be built")
    done = [line.split()[2:] for line in said.splitlines() if line.startswith("Successfully installed ")]
    return python, [name for line in done for name in line]


def _require(wheels: Path) -> None:
    missing = []
    if shutil.which(os.environ.get("CC", "gcc")) is None:
        missing.append("a C compiler (Debian: apt-get install gcc libc6-dev)")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        missing.append(f"Python's headers: there is no {header} (Debian: apt-get install python3-dev)")
    for name in ("torch", "numpy"):
        if importlib.util.find_spec(name) is None:
            missing.append(f"{name}: {sys.executable} has none; make PYTHON=... names the Python that has")
    if len(list(wheels.glob("pip-*.whl"))) != 1:
        missing.append(f"the wheels: {wheels} has not one pip-*.whl in it; make gpu-wheels fills it, with a network")
    if missing:
        raise GpuRunError("\n".join(("what is missing here:", *(f"  - {line}" for line in missing))))


def _look_into_base(folder: Path) -> None:
    """Let the environment see what the Python that makes it sees, behind its own.

    What `--system-site-packages` shows are those of the system, not those of an environment that this Python is in.
    """
    library = next(folder.glob("lib/python*/site-packages"))
    base = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    lines = [f"import site; site.addsitedir({each!r})\n" for each in base]
    (library / "zz_base_of_skipper.pth").write_text("".join(lines), encoding="utf-8")


def _run(command: list[str], failure: str) -> str:
    # Settings of pip's own, such as an index, are for machines with a network.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment, "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise GpuRunError(f"{failure}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout
