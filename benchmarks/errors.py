"""What can go wrong while measuring, each kind with the exit code that the command line gives it.

    BenchmarkError                     exit 1   the run could not be finished
    ├── UsageError(ValueError)         exit 2   asked for something that cannot be; nothing was started
    ├── ReportError(ValueError)        exit 1   a document that is not a benchmark report
    ├── PeerError(ConnectionError)     exit 1   the process at the other end
    │   ├── PeerLostError                       it ended, or its host did
    │   ├── PeerTimeoutError(TimeoutError)      it sent nothing in time, and may still live
    │   ├── PeerRefusedError                    it answered, with an error of its own
    │   └── TokenRefusedError                   the two sides do not share a token
    ├── IntegrityError                 exit 3   --check found wrong bytes, or missed planted ones
    └── BelowMinimumError              exit 4   a figure below --min-bw

Errors of the data plane itself pass through unchanged and exit with 1 too.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BelowMinimumError",
    "BenchmarkError",
    "IntegrityError",
    "PeerError",
    "PeerLostError",
    "PeerRefusedError",
    "PeerTimeoutError",
    "ReportError",
    "TokenRefusedError",
    "UsageError",
]


class BenchmarkError(Exception):
    """Root of the errors of the benchmarks."""

    exit_code: ClassVar[int] = 1


class UsageError(BenchmarkError, ValueError):
    """The command line asks for something impossible here; raised before anything is started."""

    exit_code: ClassVar[int] = 2


class ReportError(BenchmarkError, ValueError):
    """A document does not have the one shape that every benchmark of this project prints."""


class PeerError(BenchmarkError, ConnectionError):
    """The process at the other end of the side channel failed."""


class PeerLostError(PeerError):
    """The connection ended: the peer closed it, died, or its host went away."""


class PeerTimeoutError(PeerError, TimeoutError):
    """The peer said nothing within the deadline."""


class PeerRefusedError(PeerError):
    """The peer answered a request with an error.

    Attributes:
        kind: Name of the exception at the peer.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"the other side reports {kind}: {message}")
        self.kind = kind


class TokenRefusedError(PeerError):
    """The two sides hold different tokens."""


class IntegrityError(BenchmarkError):
    """Transferred data is wrong, or the check failed to notice a byte that was wrong on purpose."""

    exit_code: ClassVar[int] = 3


class BelowMinimumError(BenchmarkError):
    """A measured bandwidth is below the requested minimum."""

    exit_code: ClassVar[int] = 4
