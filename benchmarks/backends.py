"""``--backend`` of the benchmarks: which backend of the data plane they use."""

from __future__ import annotations

from skipper import dataplane
from skipper.benchmarks.errors import UsageError
from skipper.commandline.flags import TakesArguments

__all__ = ["AUTO", "add_backend", "require_backend"]

AUTO = "auto"
"""The first one that works."""

_NAMES = (AUTO, "shm", "cuda_ipc", "ucx", "verbs")


def add_backend(parser: TakesArguments) -> None:
    """``--backend``: which backend moves the data."""
    parser.add_argument(
        "--backend", choices=_NAMES, default=AUTO, help="backend that moves the data (default: the first that works)"
    )


def require_backend(name: str) -> None:
    """Check that the backend can be used here.

    Raises:
        UsageError: It cannot be used; the message says why.
    """
    if name == AUTO:
        return
    found = {status.name: status for status in dataplane.backends()}
    if name not in found:
        raise UsageError(f"there is no backend {name!r} here, only {', '.join(found)}")
    if not found[name].usable:
        raise UsageError(f"the {name} backend cannot be used here: {found[name].reason}")
