"""A virtual environment for each peer that needs one, made once and kept.

What a peer needs is installed without its dependencies, since most would pull in a CUDA build of torch of several
gigabytes; the few light ones that it really imports are listed with it. torch and numpy are those of this project's
own environment: `link_distributions` puts them and their requirements on the peer's path, and nothing else, so that a
peer does not see our versions of grpc or protobuf.

Everything is in ``.cache/peers`` of the checkout; deleting that folder undoes it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from skipper.benchmarks.errors import BenchmarkError

__all__ = ["ROOT", "Environment", "EnvironmentFailedError", "Prepared", "link_distributions", "prepare", "versions"]

ROOT = Path(__file__).resolve().parents[2]
"""The folder of the checkout."""

_FOLDER = ROOT / ".cache" / "peers"
_INSTALL_S = 600.0


class EnvironmentFailedError(BenchmarkError):
    """A peer's environment could not be made."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What to install.

    Attributes:
        name: Name of the environment.
        shown: The distribution whose version the report names.
        requirements: All requirements for pip, which installs them without dependencies.
        debian: Debian packages with shared libraries; they are unpacked into the environment, not installed.
    """

    name: str
    shown: str
    requirements: tuple[str, ...]
    debian: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """An environment that exists: its Python, and variables that processes in it need."""

    python: Path
    variables: Mapping[str, str]


def prepare(environment: Environment) -> Prepared:
    """Make the environment unless it exists.

    Raises:
        EnvironmentFailedError: pip or apt-get could not get something; the message says what they said.
    """
    folder = _FOLDER / environment.name
    python = folder / "bin" / "python"
    libraries = folder / "debian"
    paths = (
        libraries / "usr/lib" / f"{os.uname().machine}-linux-gnu",
        libraries / "lib" / f"{os.uname().machine}-linux-gnu",
    )
    variables = {"PYTHONSAFEPATH": "1"}  # packages do not come from the working directory
    if environment.debian:
        variables["LD_LIBRARY_PATH"] = ":".join(map(str, paths))
    prepared = Prepared(python, variables)
    recipe = json.dumps([sys.version, *environment.requirements, *environment.debian])
    stamp = folder / ".recipe"
    links = link_distributions(_FOLDER / "shared", ("torch", "numpy"))
    if stamp.exists() and stamp.read_text() == recipe:
        return prepared
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], environment)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--no-deps", *environment.requirements], environment)
    if environment.debian:
        libraries.mkdir()
        _run(["apt-get", "download", "-qq", *environment.debian], environment, cwd=libraries)
        for package in libraries.glob("*.deb"):
            _run(["dpkg-deb", "-x", str(package), str(libraries)], environment)
    # After the environment's own packages, so that those take precedence.
    (_site_packages(folder) / "shared.pth").write_text(f"{links}\n")
    stamp.write_text(recipe)
    return prepared


def link_distributions(folder: Path, names: tuple[str, ...]) -> Path:
    """Make a folder with links to this environment's distributions ``names``, all that they require, and this package.

    Returns:
        The folder, to be put on a path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {"skipper": ROOT / "src" / "skipper"}
    for found in _closure(names):
        for file in found.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__"):
                wanted[top] = Path(str(found.locate_file(top)))
    for name, target in wanted.items():
        link = folder / name
        if not link.is_symlink() or link.readlink() != target:
            link.unlink(missing_ok=True)
            link.symlink_to(target)
    for entry in folder.iterdir():
        if entry.name not in wanted:
            entry.unlink()
    return folder


def versions(environments: Mapping[str, Environment]) -> dict[str, str]:
    """What is installed in the environments that exist: versions by their names."""
    found = {}
    for name, environment in environments.items():
        path = [str(_site_packages(_FOLDER / environment.name))]
        for each in Distribution.discover(name=environment.shown, path=path):
            found[name] = f"{environment.shown} {each.version}"
    return found


def _closure(names: tuple[str, ...]) -> Iterator[Distribution]:
    from packaging.requirements import Requirement

    left, seen = list(names), set()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:  # a requirement of another platform, or one that this build does not need
            continue
        yield found
        for text in found.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left.append(requirement.name)


def _site_packages(folder: Path) -> Path:
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _run(command: list[str], environment: Environment, *, cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_INSTALL_S)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFailedError(f"{environment.name} is not installed after {_INSTALL_S:.0f} s") from error
    except OSError as error:
        raise EnvironmentFailedError(f"{environment.name} is not installed: no {command[0]} here") from error
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith(("ERROR", "E:"))] or ["no reason given"]
        raise EnvironmentFailedError(f"{environment.name} is not installed: {said[-1]}")
