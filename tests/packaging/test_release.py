"""A release: refused where it would not be what it says, the same in each byte whoever builds it, signed."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from tests.packaging.build import ROOT, BuildError, build
from tests.packaging.conftest import INSTALLATION_TIMEOUT_S
from tests.packaging.release import (
    CITED,
    NAMESPACE,
    SUMS,
    ReleaseError,
    require_alike,
    require_ready,
    sign,
    write_sums,
)

LEFT_BEHIND = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "*.c", "__pycache__")


def git(tree: Path, *arguments: str) -> None:
    who = ["-c", "user.name=A Tester", "-c", "user.email=tester@example.org"]
    subprocess.run(["git", "-C", str(tree), *who, *arguments], check=True, capture_output=True, timeout=60)


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A checkout of which a release can be made."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.2.0\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0 (2030-01-31)\n\n## 1.1.0 (2029-12-24)\n")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--message", "All of it")
    return tmp_path


def test_a_commit_that_the_changelog_names_can_be_released(ready: Path) -> None:
    require_ready(ready)


def test_what_is_not_committed_is_not_released(ready: Path) -> None:
    (ready / "new.py").touch()
    with pytest.raises(ReleaseError, match=r"not everything is committed: new\.py"):
        require_ready(ready)


@pytest.mark.parametrize(
    ("newest", "found"),
    [
        ("## Unreleased\n\n## 1.2.0 (2030-01-31)", "'Unreleased'"),
        ("## 1.1.0 (2029-12-24)", r"'1\.1\.0 \(2029-12-24\)'"),
        ("## 1.2.0", r"'1\.2\.0'"),
        ("## 1.2.0 (unreleased)", r"'1\.2\.0 \(unreleased\)'"),
        ("nothing yet", "'nothing'"),
    ],
)
def test_a_version_that_the_changelog_does_not_begin_with_is_not_released(newest: str, found: str, ready: Path) -> None:
    (ready / "CHANGELOG.md").write_text(f"# Changelog\n\n{newest}\n")
    git(ready, "commit", "--all", "--message", "Other words")
    with pytest.raises(ReleaseError, match=rf"says 1\.2\.0 and CHANGELOG\.md begins with {found}"):
        require_ready(ready)


def test_a_version_that_is_cited_otherwise_is_not_released(ready: Path) -> None:
    (ready / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.1.0\n")
    git(ready, "commit", "--all", "--message", "An older one")
    with pytest.raises(ReleaseError, match=r"says 1\.2\.0 and CITATION\.cff says 1\.1\.0"):
        require_ready(ready)


def test_the_version_of_this_tree_is_the_one_that_is_cited() -> None:
    cited = CITED.findall((ROOT / "CITATION.cff").read_text())
    assert cited == [tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]]


def test_a_folder_without_git_is_not_released(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="a release is made of a commit"):
        require_ready(tmp_path)


def test_builds_that_differ_are_named(tmp_path: Path) -> None:
    for folder, content in (("a", "1"), ("b", "2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same").write_text("0")
        (tmp_path / folder / "other").write_text(content)
    (tmp_path / "b" / "more").touch()
    with pytest.raises(ReleaseError, match=r"these files differ: other, more$"):
        require_alike(tmp_path / "a", tmp_path / "b")


def test_a_python_that_is_not_there_is_named(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    with pytest.raises(BuildError, match=r"a wheel for python3\.99: there is no such program"):
        build(tree, tmp_path / "out", pythons=["python3.99"], epoch=0)


@pytest.mark.timeout(INSTALLATION_TIMEOUT_S)
def test_another_user_in_another_folder_at_another_hour_builds_the_same_bytes(
    distributions: Path, sdist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(sdist) as archive:
        (epoch,) = {member.mtime for member in archive.getmembers()}
    tree = tmp_path / "a folder of some other name"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_BEHIND)
    (tmp_path / "temporary").mkdir()
    for name, value in {"TZ": "Asia/Tokyo", "LC_ALL": "C", "TMPDIR": str(tmp_path / "temporary")}.items():
        monkeypatch.setenv(name, value)
    before = os.umask(0o077)
    try:
        build(tree, tmp_path / "again", pythons=[sys.executable], epoch=int(epoch))
    finally:
        os.umask(before)
    require_alike(distributions, tmp_path / "again")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed (openssh-client)")
def test_sums_and_signature_are_those_that_the_usual_tools_check(tmp_path: Path) -> None:
    released = tmp_path / "released"
    released.mkdir()
    (released / "a-1.0.tar.gz").write_bytes(b"a")
    (released / "a-1.0.whl").write_bytes(b"b")
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, timeout=60)
    write_sums(released)
    sign(released / SUMS, key)
    (tmp_path / "signers").write_text(f"releases@skipper {key.with_suffix('.pub').read_text()}")

    assert subprocess.run(["sha256sum", "--check", "--quiet", SUMS], cwd=released, timeout=60).returncode == 0
    assert verified(tmp_path) == 0
    (released / SUMS).write_text("0" * 64 + "  a-1.0.whl\n")
    assert verified(tmp_path) != 0


def verified(folder: Path) -> int:
    """How ssh-keygen ends that looks at the signature."""
    who = ["-f", str(folder / "signers"), "-I", "releases@skipper", "-n", NAMESPACE]
    with (folder / "released" / SUMS).open() as sums:
        command = ["ssh-keygen", "-Y", "verify", *who, "-s", str(folder / "released" / f"{SUMS}.sig")]
        return subprocess.run(command, stdin=sums, capture_output=True, timeout=60).returncode


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed (openssh-client)")
def test_a_key_that_is_not_there_signs_nothing(tmp_path: Path) -> None:
    (tmp_path / SUMS).touch()
    with pytest.raises(ReleaseError, match="SHA256SUMS cannot be signed with"):
        sign(tmp_path / SUMS, tmp_path / "no-key")
