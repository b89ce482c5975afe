"""Another user of this host, for tests of what one can do to us. Only root can become one."""

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

import pytest

STRANGER = 12345
"""A uid that is nobody's."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


_BECOME = f"import os, socket, sys, time; os.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER}); os.umask(0)\n"
"""The modules first: another user need not see where this Python lies."""


def as_stranger(code: str) -> str:
    """Run Python code as another user, with `os`, `socket`, `sys` and `time` at hand; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", _BECOME + textwrap.dedent(code)], cwd="/", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def meeting_place() -> Iterator[Path]:
    """A folder that everybody may write to, sticky, as ``/tmp`` is."""
    path = Path(tempfile.mkdtemp(prefix="skipper-test-", dir="/tmp"))
    path.chmod(0o1777)
    try:
        yield path
    finally:
        rmtree(path)
