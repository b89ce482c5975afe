"""A peer's process as the runner sees it: requests with deadlines, a bound on memory, and no process left behind."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipper.benchmarks.errors import PeerError, PeerLostError, PeerTimeoutError
from skipper.benchmarks.machine import available_nbytes
from skipper.benchmarks.peers import keeper
from skipper.benchmarks.peers.environments import ROOT

__all__ = ["Bounds", "PeerSession", "TooMuchMemoryError"]

_GRACE_S = 2.0
_END_S = 15.0
_LOOK_S = 1.0
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
_KEPT_BACK = ("PYTHON", "SKIPPER_", "RAY_", "GRPC_", "UCX_", "OMP_", "LD_")


class TooMuchMemoryError(PeerError):
    """A peer took more memory than it may, and was ended."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a peer may take.

    Attributes:
        start_s: Until it is ready.
        row_s: For one row.
        memory_nbytes: Private memory of all its processes together.
        spare_nbytes: Memory that must stay available on the machine, no matter which process took the rest.
    """

    start_s: float = 120.0
    row_s: float = 90.0
    memory_nbytes: int = 12 << 30
    spare_nbytes: int = 1 << 30


class PeerSession:
    """One process of a peer, and all that it starts."""

    def __init__(self, process: subprocess.Popen[str], log: Path, bounds: Bounds) -> None:
        self._process = process
        self._log = log
        self._bounds = bounds

    @classmethod
    @contextlib.contextmanager
    def start(
        cls, command: Sequence[str], variables: Mapping[str, str] | None = None, bounds: Bounds | None = None
    ) -> Iterator[PeerSession]:
        """Start ``command``, which speaks `benchmarks.peers.protocol`, in a folder of its own; all ends with the block.

        Args:
            command: With its arguments.
            variables: Environment variables to add to those of this process that cannot change a result.
            bounds: What it may take.

        Raises:
            PeerError: It ended, said nothing in time, or took too much memory.
        """
        bounds = bounds or Bounds()
        # A short path, since peers put sockets into the folder, and the path of a socket may have 107 bytes.
        folder = Path(tempfile.mkdtemp(prefix="peer-"))
        kept = [sys.executable, keeper.__file__, *command]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_KEPT_BACK)}
        environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), **(variables or {})}
        log = folder / "said"
        try:
            with (
                log.open("w") as said,
                subprocess.Popen(
                    kept,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    text=True,
                    cwd=folder,
                    env=environment,
                    start_new_session=True,
                ) as process,
            ):
                session = cls(process, log, bounds)
                grace_s = 0.0
                try:
                    session._answer(bounds.start_s, "its start")
                    yield session
                    grace_s = _GRACE_S
                finally:
                    session._end(grace_s)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def ask(self, row: str, *, n: int, limit_s: float) -> dict[str, Any]:
        """Have a row done; see `benchmarks.peers.protocol` for the answer.

        Raises:
            PeerError: As for `start`. The session is of no use afterwards.
        """
        assert self._process.stdin is not None  # see start
        try:
            print(json.dumps({"row": row, "n": n, "limit_s": limit_s}), file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            raise PeerLostError(self._last_words("it has ended")) from error
        return self._answer(self._bounds.row_s, "this row")

    def _answer(self, timeout_s: float, what: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        until = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not selector.select(min(_LOOK_S, max(until - time.monotonic(), 0))):
                if time.monotonic() >= until:
                    raise PeerTimeoutError(f"it hung: {timeout_s:.0f} s were not enough for {what}")
                self._check_memory()
        line = self._process.stdout.readline()  # answers are written whole
        if not line:
            raise PeerLostError(self._last_words(f"it ended during {what}"))
        try:
            answer: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError as error:
            raise PeerLostError(f"it sent an invalid answer: {line[:80]!r}") from error
        return answer

    def _check_memory(self) -> None:
        taken = sum(map(_private_nbytes, keeper.descendants(self._process.pid)))
        if taken > self._bounds.memory_nbytes:
            raise TooMuchMemoryError(f"it took {taken / 2**30:.1f} GiB of memory, and was ended")
        if available_nbytes() < self._bounds.spare_nbytes:
            raise TooMuchMemoryError("it was ended, since the machine was about to run out of memory")

    def _last_words(self, what: str) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_GRACE_S)
            what += f" with exit code {code}"
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{what}: {lines[-1][:200]}" if lines else what

    def _end(self, grace_s: float) -> None:
        """Close its input. The keeper kills what has not ended in time, and ends last."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()


def _private_nbytes(pid: int) -> int:
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (OSError, ValueError):  # it has ended
        return 0
    return (int(resident) - int(shared)) * _PAGE_NBYTES
