"""Makes a release: every file built twice from the last commit, in two folders, and the same in each byte.

python -m tests.packaging.release [--out DIR] [--python PYTHON ...] [--sign KEY]

Beside the source distribution and the wheels it writes SHA256SUMS, and SHA256SUMS.sig where a key is named. Nothing is
uploaded. It refuses changes that are not committed, and a version that the changelog or CITATION.cff does not have.
"""

import argparse
import filecmp
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tests.packaging.build import ROOT, BuildError, build, epoch_of

SUMS = "SHA256SUMS"
NAMESPACE = "skipper-release"
"""What a signature of ssh-keygen is for: one for something else does not pass for one of a release."""

_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
CITED = re.compile(r"^version: (.+)$", re.MULTILINE)
_TOOL_TIMEOUT_S = 60.0
_SIGNING_TIMEOUT_S = 300.0  # a passphrase may be asked for, or a touch of a token


class ReleaseError(Exception):
    """There is no release to be made of this tree, or not this one; says what to do."""


def release(tree: Path, out: Path, *, pythons: Sequence[str], key: Path | None) -> list[Path]:
    """Build, compare, sum up and sign.

    Args:
        tree: A checkout; its last commit is what is released.
        out: A folder that has nothing in it, or is not there yet.
        pythons: Interpreters to build a wheel for.
        key: A private key of SSH, or the public one whose other half an agent has.

    Returns:
        All files in `out`.

    Raises:
        ReleaseError: The tree is not ready, two builds differ, or the key does not sign.
        BuildError: A step of the build failed.
    """
    require_ready(tree)
    if out.exists() and any(out.iterdir()):
        raise ReleaseError(f"{out} is not empty")
    print(f"building twice for {', '.join(pythons)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="skipper-release-") as folder:
        # The second is named otherwise, and longer: a path that got into a file shows.
        once, again = Path(folder, "a"), Path(folder, "built-once-more-in-another-folder")
        for each in (once, again):
            export(tree, each / "tree")
            build(each / "tree", each / "files", pythons=pythons, epoch=epoch_of(tree))
        require_alike(once / "files", again / "files")
        shutil.copytree(once / "files", out, dirs_exist_ok=True)
    write_sums(out)
    if key is not None:
        sign(out / SUMS, key)
    return sorted(out.iterdir())


def require_ready(tree: Path) -> None:
    """See that everything is committed, and that changelog and citation have the version of pyproject.toml.

    Raises:
        ReleaseError: It is not so.
    """
    changed = _git(tree, "status", "--porcelain").splitlines()
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise ReleaseError(f"not everything is committed: {', '.join(line[3:] for line in changed[:3])}{more}")
    version = str(tomllib.loads((tree / "pyproject.toml").read_text())["project"]["version"])
    cited = next(iter(CITED.findall((tree / "CITATION.cff").read_text())), "nothing")
    if cited != version:
        raise ReleaseError(f"pyproject.toml says {version} and CITATION.cff says {cited}: make them equal")
    newest = next(iter(_HEADING.findall((tree / "CHANGELOG.md").read_text())), "nothing")
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", newest):
        raise ReleaseError(
            f"pyproject.toml says {version} and CHANGELOG.md begins with {newest!r}: "
            f"it has to be '## {version} (YYYY-MM-DD)'"
        )


def export(tree: Path, folder: Path) -> None:
    """The last commit, as files in a folder of its own: nothing of what was built in the checkout."""
    command = ["git", "-C", str(tree), "archive", "--format=tar", "HEAD"]
    archive = subprocess.run(command, check=True, capture_output=True, timeout=_TOOL_TIMEOUT_S).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")


def require_alike(once: Path, again: Path) -> None:
    """See that two builds have the same files.

    Raises:
        ReleaseError: Names those that differ.
    """
    names = sorted({file.name for folder in (once, again) for file in folder.iterdir()})
    _, differ, missing = filecmp.cmpfiles(once, again, names, shallow=False)
    if differ or missing:
        raise ReleaseError(f"built twice, these files differ: {', '.join([*differ, *missing])}")


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS, which `sha256sum --check` takes."""
    files = sorted(file for file in folder.iterdir() if not file.name.startswith(SUMS))
    lines = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (folder / SUMS).write_text("".join(lines))


def sign(file: Path, key: Path) -> None:
    """Write a detached signature beside a file, named as it is and `.sig`.

    Raises:
        ReleaseError: It cannot be signed with that key.
    """
    command = ["ssh-keygen", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(file)]
    try:
        subprocess.run(command, check=True, timeout=_SIGNING_TIMEOUT_S)
    except FileNotFoundError as error:
        raise ReleaseError("SHA256SUMS cannot be signed: there is no ssh-keygen (of OpenSSH 8.2 or newer)") from error
    except subprocess.SubprocessError as error:
        raise ReleaseError(f"{file.name} cannot be signed with {key}: {error}") from error


def found_pythons() -> list[str]:
    """The Python that runs this, and every other from 3.11 on that is on PATH, starts, and has its headers."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    names = [f"3.{minor}" for minor in range(11, 15)]
    return [sys.executable, *(f"python{name}" for name in names if name != own and _builds(f"python{name}"))]


def _builds(python: str) -> bool:
    program = "import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path('include') + '/Python.h'))"
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, timeout=_TOOL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _git(tree: Path, *arguments: str) -> str:
    command = ["git", "-C", str(tree), *arguments]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S)
    except FileNotFoundError as error:
        raise ReleaseError("a release is made of a commit, and there is no git") from error
    except subprocess.SubprocessError as error:
        raise ReleaseError(f"a release is made of a commit, and git says nothing of {tree}: {error}") from error
    return done.stdout


def main() -> int:
    """Release this tree."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.packaging.release", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the files go (dist)")
    parser.add_argument("--python", action="append", default=[], help="build a wheel for this one, not for all found")
    parser.add_argument("--sign", type=Path, metavar="KEY", help="a key of SSH; its public half, if an agent has it")
    given = parser.parse_args()
    for name in ("SOURCE_DATE_EPOCH", "UCX_HOME"):  # a release has the time of its commit, and the pinned headers
        os.environ.pop(name, None)
    pythons = given.python or found_pythons()
    try:
        files = release(ROOT, given.out, pythons=pythons, key=given.sign)
    except (ReleaseError, BuildError) as error:
        sys.exit(f"error: {error}")
    print(*files, sep="\n")
    print(f"to check:\n  cd {given.out} && sha256sum --check {SUMS}")
    if given.sign is not None:
        print(
            f"  ssh-keygen -Y verify -f ALLOWED_SIGNERS -I SIGNER -n {NAMESPACE} -s {SUMS}.sig <{SUMS}\n"
            "(ALLOWED_SIGNERS: a file of lines 'SIGNER PUBLIC-KEY'; see SECURITY.md)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
