"""Asking in a process of its own: a probe may crash or hang, and costs no more than its deadline."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_PROBES = Path(__file__).parent / "probes"
TIMEOUT_S = 10.0


class ProbeError(Exception):
    """A probe gave no answer; says why in a few words."""


def ask(probe: str, *arguments: str, timeout: float = TIMEOUT_S) -> Any:
    """Run a program of `probes` and read the JSON that it prints.

    Args:
        probe: Its name, without ``.py``.
        arguments: For it.
        timeout: Seconds until it is killed.

    Raises:
        ProbeError: It printed no JSON: it was killed by a signal or by the deadline, or failed.
    """
    # -P: the folder of the probes is no place to import from.
    command = [sys.executable, "-P", str(_PROBES / f"{probe}.py"), *arguments]
    # UCX would write its own complaints to standard output, among the answer.
    environment = {**os.environ, "UCX_LOG_LEVEL": "fatal"}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise ProbeError(f"no answer within {timeout:.3g} s") from error
    except OSError as error:
        raise ProbeError(f"it cannot be asked: {error}") from error
    if done.returncode < 0:
        raise ProbeError(f"killed by signal {-done.returncode}")
    try:
        return json.loads(done.stdout)
    except ValueError as error:
        last = done.stderr.strip().rpartition("\n")[2]
        raise ProbeError(last or f"ended with status {done.returncode}") from error
