"""Scripts that use a real Ray, each in a process and a Ray of its own: ``python -m MODULE FOLDER``.

They print what they have found out as lines of JSON objects, among what Ray prints.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from tests.tree import ROOT

ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
"""Ray sends nothing to its makers, and leaves no token in the user's home."""


@dataclass(frozen=True)
class RayScriptRun:
    """What came of a script.

    Attributes:
        status: How its process has ended.
        lines: What it has found out.
        written: All else, for errors.
    """

    status: int
    lines: list[dict[str, Any]]
    written: str


def run_ray_script(module: str, *path: str, timeout: float) -> RayScriptRun:
    """Run a module with a folder for its Ray, which is gone afterwards; ``path`` goes before that of this process."""
    search = os.pathsep.join(filter(None, (*path, str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # paths of Ray's sockets are short
        done = subprocess.run(
            [sys.executable, "-m", module, folder],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": search},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    return RayScriptRun(done.returncode, lines, done.stdout + done.stderr)


def start_ray(folder: str, *, cpus: int) -> None:
    """Begin Ray in the process of such a script."""
    import ray

    ray.init(address="local", num_cpus=cpus, include_dashboard=False, object_store_memory=80_000_000, _temp_dir=folder)
