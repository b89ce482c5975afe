"""Where a figure was taken: the machine, the software, the commit. No names, no paths, no secrets."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

__all__ = ["Environment", "gather_environment"]

Environment = dict[str, str | int | None]

_DISTRIBUTIONS = {
    "skipper": ("skipper-mesh",),
    "torch": ("torch",),
    "numpy": ("numpy",),
    "ucx": ("libucx-cu13", "libucx-cu12"),  # one of them is installed
}
_GIT_TIMEOUT_S = 5.0


def gather_environment() -> Environment:
    """Describe the machine and the software of this run, in plain values.

    It takes some milliseconds and imports nothing heavy: versions come from package metadata. What cannot be found out
    is ``None``.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "machine": platform.machine(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(distributions) for name, distributions in _DISTRIBUTIONS.items()},
        "commit": _commit(),
    }


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in fields if key.strip() in ("model name", "Model")), None)


def _version(distributions: Sequence[str]) -> str | None:
    """The version of the first distribution that is installed."""
    # This import takes a tenth of the start of a process, and the actors of a benchmark do not need it.
    from importlib.metadata import PackageNotFoundError, version

    for name in distributions:
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return None


def _commit() -> str | None:
    """The commit of the checkout that has this package, ``+changes`` when the tree differs from it."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
