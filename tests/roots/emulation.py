"""Programs of other processors on this one: qemu in user mode, which the kernel starts for them."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_REGISTRY = Path("/proc/sys/fs/binfmt_misc")
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_ELF = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00"
_MACHINE_NUMBERS = {"arm64": r"\xb7\x00"}
_MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"


class EmulationError(Exception):
    """This machine cannot run programs of that processor; the message says what to do."""


def is_needed(architecture: str) -> bool:
    """Whether programs of a processor, named as Debian does, are not this machine's own."""
    return MACHINES[architecture] != platform.machine()


@contextmanager
def of(architecture: str) -> Iterator[None]:
    """Have the kernel run programs of a processor, named as Debian does, until this ends.

    Raises:
        EmulationError: it cannot.
    """
    machine = MACHINES[architecture]
    if not is_needed(architecture) or any(_REGISTRY.glob(f"*{machine}*")):
        yield
        return
    qemu = shutil.which(f"qemu-{machine}-static") or shutil.which(f"qemu-{machine}")
    if qemu is None:
        raise EmulationError(f"there is no qemu-{machine}-static: apt-get install qemu-user-static")
    entry = f"skipper-{machine}"
    # F: the kernel opens qemu now, and finds it in any root.
    line = f":{entry}:M::{_ELF}{_MACHINE_NUMBERS[architecture]}:{_MASK}:{qemu}:F"
    with _registry():
        try:
            (_REGISTRY / "register").write_text(line)
        except OSError as error:
            raise EmulationError(f"the kernel does not take {qemu} for programs of {machine}: {error}") from error
        try:
            yield
        finally:
            (_REGISTRY / entry).write_text("-1")


@contextmanager
def _registry() -> Iterator[None]:
    """Have the kernel's table of such programs mounted meanwhile."""
    if (_REGISTRY / "register").exists():
        yield
        return
    if subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", str(_REGISTRY)], check=False).returncode:
        raise EmulationError("the kernel does not say by whom it has programs run (binfmt_misc)")
    try:
        yield
    finally:
        subprocess.run(["umount", str(_REGISTRY)], check=False)
