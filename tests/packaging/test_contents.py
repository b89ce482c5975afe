"""The distributions hold all that runs, and nothing that this machine has made on the way."""

import os
import re
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from tests.packaging.conftest import PACKAGES, ROOT

EXTENSIONS = {
    "skipper/dataplane/_copy",
    "skipper/dataplane/backends/ucx/_ucp",
    "skipper/dataplane/backends/verbs/lock",
}
SOURCES_OF_EXTENSIONS = {".h", ".pxd", ".pxi", ".pyx"}
SOURCE = ROOT / "src"
BUILT = {".c", ".so", ".pyc"}
PROJECT = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "constraints.txt", "pyproject.toml", "setup.py"}


def _sources() -> set[str]:
    """Every file of the packages in the checkout, but for what was built and the peers, which need a checkout."""
    folders = os.walk(SOURCE / "skipper", followlinks=True)  # the rooms are links
    files = (Path(folder, name) for folder, _, found in folders for name in found)
    names = {str(file.relative_to(SOURCE)) for file in files if file.suffix not in BUILT}
    return {name for name in names if not name.startswith(("skipper/benchmarks/peers/", "skipper/benchmarks/results/"))}


def _version() -> str:
    with open(ROOT / "pyproject.toml", "rb") as file:
        return str(tomllib.load(file)["project"]["version"])


def test_the_source_distribution_is_the_packages_and_what_builds_them(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    made = {name for name in names if name.startswith("src/skipper_mesh.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert names - made == {f"src/{name}" for name in _sources()} | PROJECT


def test_the_wheel_is_the_packages_and_their_extensions(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    compiled = {name for name in names if name.endswith(".so")}
    assert {name.partition(".")[0] for name in compiled} == EXTENSIONS
    assert len(compiled) == len(EXTENSIONS)
    assert names - compiled == {name for name in _sources() if Path(name).suffix not in SOURCES_OF_EXTENSIONS}


def test_every_package_says_that_it_is_typed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert {f"{package}/py.typed" for package in PACKAGES} <= set(archive.namelist())


def test_the_version_is_the_newest_of_the_changelog(wheel: Path, sdist: Path) -> None:
    version = _version()
    with zipfile.ZipFile(wheel) as archive:
        metadata = HeaderParser().parsestr(archive.read(f"skipper_mesh-{version}.dist-info/METADATA").decode())
    assert metadata["Version"] == version
    assert sdist.name == f"skipper_mesh-{version}.tar.gz"
    released = re.findall(r"^## (\d\S*) \(\d{4}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == version
