"""The wheels that bring UCX, one for each CUDA: which are installed here, which one fits, and the command that gets it.

`libucx-cu12` and `libucx-cu13` hold the same files, of the same package `libucx`. In one environment the one that was
installed last has overwritten the other, and to remove either removes the files of both.
"""

import functools
import shlex
import sys
from dataclasses import dataclass

from skipper.dataplane import tensors

WHEELS = {12: "libucx-cu12", 13: "libucx-cu13"}
"""By the major version of the CUDA that they are built with."""

_VERSION = "1.22.*"  # what is tried with Skipper; the guard against a fault of UCX is for it (ucp_guard.h)
_WITHOUT_CUDA = WHEELS[12]


@dataclass(frozen=True, slots=True)
class UcxWheels:
    """What this environment has.

    Attributes:
        installed: Those of `WHEELS` that are installed, with their versions.
        cuda: What its torch was built for, as "13.0"; None without torch, or where that is for no CUDA.
    """

    installed: dict[str, str]
    cuda: str | None

    @property
    def for_torch(self) -> str | None:
        """The wheel for the CUDA of torch; None where that has none, or one for which there is no wheel."""
        return WHEELS.get(int(self.cuda.partition(".")[0])) if self.cuda else None

    @property
    def fitting(self) -> str:
        """The wheel for this environment: that for torch, or else the one that is there."""
        return self.for_torch or next(iter(self.installed), _WITHOUT_CUDA)

    @property
    def command(self) -> str:
        """What to type for this environment to have that wheel, whole, and no other."""
        pip = f"{shlex.quote(sys.executable)} -m pip"
        install = f"{pip} install '{self.fitting}=={_VERSION}'"
        return f"{pip} uninstall -y {' '.join(self.installed)} && {install}" if self.installed else install


@functools.cache
def installed_wheels() -> UcxWheels:
    """Look at this environment, once."""
    found = {name: _version(name) for name in WHEELS.values()}
    return UcxWheels({name: known for name, known in found.items() if known is not None}, tensors.built_for_cuda())


def _version(distribution: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # slow, and few processes ask

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
