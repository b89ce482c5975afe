"""The wheels that a machine with a GPU and without a network may lack, downloaded where there is one.

torch, numpy, and whatever else the machine has already stay out: what is here is carried by hand, so it has to be
small.
"""

import subprocess
import sys
import tomllib
from collections.abc import Collection
from pathlib import Path

from tests.gpu.errors import GpuRunError
from tests.tree import ROOT

LIMIT_MIB = 56.0
_THEIRS = {"torch", "numpy"}
"""Never installed: they have to fit the driver, and one another."""
_TOOLS = ("setuptools", "cython")
_TESTS = ("hypothesis", "psutil", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "safetensors")
_PLATFORMS = ("_2_28", "_2_24", "_2_17", "2014", "_2_12", "2010", "1")
"""Of manylinux: what a machine with glibc 2.28 takes. pip matches each name literally."""


def requirements(cuda: str) -> list[str]:
    """What the tests are run with, by the bounds of pyproject.toml: no torch, no numpy, and UCX for that CUDA.

    Raises:
        GpuRunError: There is no UCX for it.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    if f"cu{cuda}" not in extras:
        raise GpuRunError(f"there is no UCX for CUDA {cuda}: pyproject.toml has no extra cu{cuda}")
    bounds = {_name(line): line.partition(";")[0].strip() for line in (*extras["dev"], *extras["test"])}
    wanted = [line for line in project["dependencies"] if _name(line) not in _THEIRS]
    return [*wanted, *extras[f"cu{cuda}"], *(bounds.get(name, name) for name in (*_TOOLS, *_TESTS))]


def download(folder: Path, *, python: str, cuda: str, has: Collection[str], limit_mib: float) -> list[Path]:
    """Fill the folder with wheels for that Python, in place of those that lay there.

    Args:
        folder: Where to.
        python: Such as "3.12".
        cuda: The major version, such as "13".
        has: Names of packages that the machine has in a version that will do.
        limit_mib: How large all of them may be together.

    Raises:
        GpuRunError: pip does not find one of them, or they are larger than the limit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    command += ["--implementation=cp", f"--python-version={python}", "--dest", str(folder)]
    command += [f"--platform=manylinux{glibc}_x86_64" for glibc in _PLATFORMS]
    command += ["--constraint", str(ROOT / "constraints.txt"), "pip", *requirements(cuda)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise GpuRunError(f"pip does not find all wheels for CPython {python}:\n{done.stderr.strip()}")
    left_out = {_wheel_name(name) for name in has}
    for wheel in folder.glob("*.whl"):
        if _wheel_name(wheel.name.partition("-")[0]) in left_out:
            wheel.unlink()
    wheels = sorted(folder.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size)
    mib = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    if mib > limit_mib:
        sizes = [(wheel.name.partition("-")[0], wheel.stat().st_size / 2**20) for wheel in wheels[:6]]
        largest = ", ".join(f"{name} {size:.1f}" for name, size in sizes)
        raise GpuRunError(
            f"the wheels take {mib:.1f} MiB, more than {limit_mib:g} (in MiB: {largest}, ...): name by GPU_HAS what "
            "the machine has already, or allow more by GPU_WHEELS_MIB"
        )
    return wheels


def _name(requirement: str) -> str:
    for sign in "<>=!~;[ ":
        requirement = requirement.partition(sign)[0]
    return requirement.lower()


def _wheel_name(name: str) -> str:
    return name.lower().replace("-", "_")
