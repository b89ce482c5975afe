"""The distributions hold all that runs, and nothing that this machine has made on the way."""

import base64
import csv
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

from tests.integration.test_docs import FENCE, LINK
from tests.packaging.build import FROM_ELSEWHERE
from tests.packaging.conftest import PACKAGES, ROOT

EXTENSIONS = {
    "skipper/control/model/_future",
    "skipper/control/wire/_frames",
    "skipper/control/wire/_plain",
    "skipper/control/wire/_poller",
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
    names = {name for name in _names(wheel) if ".dist-info/" not in name}
    compiled = {name for name in names if name.endswith(".so")}
    assert {name.partition(".")[0] for name in compiled} == EXTENSIONS
    assert len(compiled) == len(EXTENSIONS)
    assert names - compiled == {name for name in _sources() if Path(name).suffix not in SOURCES_OF_EXTENSIONS}


def test_every_package_says_that_it_is_typed(wheel: Path) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= _names(wheel)


def test_the_version_is_the_newest_of_the_changelog(wheel: Path, sdist: Path) -> None:
    version = _version()
    metadata = HeaderParser().parsestr(_wheel_file(wheel, "METADATA"))
    assert metadata["Version"] == version
    assert sdist.name == f"skipper_mesh-{version}.tar.gz"
    headings = re.findall(r"^## (\d\S*) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0][0] == version
    assert re.fullmatch(r"unreleased|\d{4}-\d\d-\d\d", headings[0][1])


def test_the_wheel_runs_from_glibc_2_17_on_as_its_tag_says(wheel: Path) -> None:
    # Where auditwheel looks for libraries is a folder with none: the UCX of this machine is not what it is to judge.
    command = [sys.executable, "-m", "auditwheel", "show", "--json", "--ldpaths", os.devnull, str(wheel)]
    shown = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)
    tag = f"manylinux_2_17_{platform.machine()}"
    assert shown["sym_tag"] == tag, shown
    assert set(shown["external_libs"]) == set(FROM_ELSEWHERE)
    assert tag in wheel.name
    assert tag in _wheel_file(wheel, "WHEEL")


def test_the_extensions_ask_for_ucx_by_its_name_and_look_nowhere_of_their_own(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        modules = {name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
    asked = set()
    for name, module in modules.items():
        with ELFFile(io.BytesIO(module)) as file:
            dynamic = file.get_section_by_name(".dynamic")
            assert isinstance(dynamic, DynamicSection)
            tags = list(dynamic.iter_tags())
            assert not [tag for tag in tags if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")], name
            asked |= {tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"}
    assert {name for name in asked if not name.startswith(("libc.", "libpthread.", "ld-linux"))} == set(FROM_ELSEWHERE)


def test_the_record_lists_every_file_with_its_hash(wheel: Path) -> None:
    rows = {name: (digest, size) for name, digest, size in csv.reader(_wheel_file(wheel, "RECORD").splitlines())}
    assert set(rows) == _names(wheel)
    with zipfile.ZipFile(wheel) as archive:
        for name, (digest, size) in rows.items():
            data = archive.read(name)
            right = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, size) in ((f"sha256={right}", str(len(data))), ("", "")), name
    assert [name for name, row in rows.items() if row == ("", "")] == [f"skipper_mesh-{_version()}.dist-info/RECORD"]


def test_the_readme_of_an_index_has_its_code_and_no_link_that_leads_nowhere(wheel: Path) -> None:
    metadata = HeaderParser().parsestr(_wheel_file(wheel, "METADATA"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    shown, readme = metadata.get_payload(), (ROOT / "README.md").read_text()
    assert isinstance(shown, str)
    assert [fence[0] for fence in FENCE.finditer(shown)] == [fence[0] for fence in FENCE.finditer(readme)]
    assert LINK.findall(readme)
    assert LINK.findall(FENCE.sub("", shown)) == []


def test_the_licence_is_in_both(wheel: Path, sdist: Path) -> None:
    licence = (ROOT / "LICENSE").read_text()
    assert _wheel_file(wheel, "licenses/LICENSE") == licence
    with tarfile.open(sdist) as archive:
        member = archive.extractfile(f"skipper_mesh-{_version()}/LICENSE")
        assert member is not None
        assert member.read().decode() == licence
    assert HeaderParser().parsestr(_wheel_file(wheel, "METADATA"))["License-Expression"] == "BSD-3-Clause"


def test_ucx_is_asked_for_by_extras_alone(wheel: Path) -> None:
    asked = HeaderParser().parsestr(_wheel_file(wheel, "METADATA")).get_all("Requires-Dist") or []
    assert sorted(line for line in asked if line.startswith("libucx")) == [
        'libucx-cu12>=1.22.0; extra == "cu12"',
        'libucx-cu13>=1.22.0; extra == "cu13"',
    ]


def _names(wheel: Path) -> set[str]:
    """The files in it."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename for info in archive.infolist() if not info.is_dir()}


def _wheel_file(wheel: Path, name: str) -> str:
    """A file of its dist-info."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"skipper_mesh-{_version()}.dist-info/{name}").decode()
