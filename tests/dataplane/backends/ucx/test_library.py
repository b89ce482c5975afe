"""Which libucp a process loads."""

import shutil
import subprocess
import sys
from pathlib import Path

import libucx
import pytest

_WHEEL = Path(libucx.__file__).parent / "lib"
_SCRIPT = """
import ctypes, sys
from skipper import dataplane
from skipper.dataplane import RDMABuffer
for name in sys.argv[2:]:
    ctypes.CDLL(f"{sys.argv[1]}/{name}", mode=ctypes.RTLD_GLOBAL)
RDMABuffer(bytearray(8)).serialize()
print(*sorted({line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps") if "/libucp.so" in line}))
"""


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The libraries of another UCX; the path has a space."""
    return Path(shutil.copytree(_WHEEL, tmp_path / "another ucx"))


def loaded(folder: Path, *names: str) -> str:
    command = [sys.executable, "-c", _SCRIPT, str(folder), *names]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_the_ucx_of_the_wheel_is_loaded(other: Path) -> None:
    assert Path(loaded(other)).parent == _WHEEL.resolve()


def test_the_ucx_that_a_process_has_already_is_used(other: Path) -> None:
    assert Path(loaded(other, "libucs.so.0")).parent == other
