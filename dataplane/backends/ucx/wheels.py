"""The wheels that contain UCX, one for each CUDA: which are installed, which one fits, and the command to install it.

`libucx-cu12` and `libucx-cu13` contain the same files, of the same package `libucx`. In one environment the one
installed last has overwritten the other, and removing either removes the files of both.
"""

import functools
import shlex
import sys
from dataclasses import dataclass

from skipper.dataplane import tensors

WHEELS = {12: "libucx-cu12", 13: "libucx-cu13"}
"""The wheels, by the major version of the CUDA that they are built with."""

_VERSION = "1.22.*"  # tested with Skipper; the guard against a fault of UCX is for it (ucp_guard.h)
_WITHOUT_CUDA = WHEELS[12]


@dataclass(frozen=True, slots=True)
class UcxWheels:
    """The wheels in this environment.

    Attributes:
        installed: The installed ones of `WHEELS`, with their versions.
        cuda: The CUDA that its torch was built for, such as "13.0"; None without torch, or if torch has no CUDA.
    """

    installed: dict[str, str]
    cuda: str | None

    @property
    def for_torch(self) -> str | None:
        """The wheel for the CUDA of torch; None if torch has none, or no wheel exists for it."""
        return WHEELS.get(int(self.cuda.partition(".")[0])) if self.cuda else None

    @property
    def fitting(self) -> str:
        """The wheel for this environment: the one for torch, or else the installed one."""
        return self.for_torch or next(iter(self.installed), _WITHOUT_CUDA)

    @property
    def command(self) -> str:
        """The command after which this environment has that wheel, complete, and no other."""
        pip = f"{shlex.quote(sys.executable)} -m pip"
        install = f"{pip} install '{self.fitting}=={_VERSION}'"
        return f"{pip} uninstall -y {' '.join(self.installed)} && {install}" if self.installed else install


@functools.cache
def installed_wheels() -> UcxWheels:
    """The wheels in this environment, looked up once."""
    found = {name: _version(name) for name in WHEELS.values()}
    return UcxWheels({name: known for name, known in found.items() if known is not None}, tensors.built_for_cuda())


def _version(distribution: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and few processes need it

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
