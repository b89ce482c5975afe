"""Control groups of their own for scripts of the tests."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

V1 = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def group_of_its_own(controller: str, **limits: int) -> Iterator[Path]:
    """A group with limits, named with underscores for dots, to whose ``cgroup.procs`` processes can be written."""
    top = V1 / controller if (V1 / controller).is_dir() else V1
    folder = top / f"skipper-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        folder.mkdir()
        for name, value in limits.items():
            (folder / name.replace("__", ".")).write_text(str(value))
        for name in ("memory.swappiness", "memory.swap.max"):
            if (folder / name).exists():
                (folder / name).write_text("0")  # what does not fit is killed
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group with a limit of {controller} can be made here: {error}")
    try:
        yield folder
    finally:
        deadline = time.monotonic() + 10
        while True:
            try:
                folder.rmdir()
            except OSError:  # its processes are still ending
                assert time.monotonic() < deadline
                time.sleep(0.01)
            else:
                break
