"""``python -m skipper.benchmarks.checkpoints``: save and load a state dict by the store's calls, and by DCP.

`torch.distributed.checkpoint` with files in memory (tmpfs) and a memcpy of as many bytes run to compare. All of it
runs in one process, as in a rank of a job; the volumes are processes of their own.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import warnings
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from skipper import dataplane
from skipper import torchstore as ts
from skipper.benchmarks import output, program
from skipper.benchmarks.errors import BenchmarkError
from skipper.benchmarks.program import Parser, report_parser
from skipper.benchmarks.report import Result
from skipper.benchmarks.statistics import Contestant, Schedule, interleave
from skipper.control import ControlError, shutdown
from skipper.dataplane.errors import DataplaneError
from skipper.torchstore.dcp import StoreReader, StoreWriter
from skipper.torchstore.errors import StoreError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["main"]

_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class _Workload:
    """How much is saved and loaded, and how often.

    Attributes:
        tensors: How many the state dict has.
        tensor_nbytes: Bytes of each tensor.
        rounds: How often each way is timed.
    """

    tensors: int
    tensor_nbytes: int
    rounds: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.tensors * self.tensor_nbytes

    def state(self, value: float) -> dict[str, Any]:
        """A state dict."""
        weights = {f"layer.{at}": torch.full((self.tensor_nbytes // 4,), value + at) for at in range(self.tensors)}
        return {"model": weights, "step": int(value)}


_FULL = _Workload(64, 4 << 20, 12)
_QUICK = _Workload(4, 1 << 18, 2)


def parser(prog: str) -> Parser:
    """The parser of the command."""
    return report_parser(prog, __doc__)


def main(argv: Sequence[str], *, prog: str = "python -m skipper.benchmarks.checkpoints") -> int:
    """Run the benchmark; returns the exit code, as ``--help`` lists them."""
    given = parser(prog).read(argv)
    if isinstance(given, int):
        return given
    workload = _QUICK if given.quick else _FULL
    try:
        return program.run(
            argv,
            lambda rows: rows.extend(_measure(workload)),
            prog=prog,
            json=given.json,
            csv=given.csv,
            tables=lambda rows: [_table(rows)],
            config=lambda: {"tool": "checkpoints", "quick": given.quick, **asdict(workload)},
            failures=(ControlError, StoreError, DataplaneError, TimeoutError, OSError, MemoryError),
        )
    finally:
        shutdown()


def _measure(workload: _Workload) -> list[Result]:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    asyncio.run(ts.initialize(2, ts.LocalRankStrategy()))
    with tempfile.TemporaryDirectory(dir=_MEMORY) as directory:
        state, into = workload.state(1.0), workload.state(0.0)
        source, target = (torch.ones(workload.nbytes, dtype=torch.uint8) for _ in range(2))
        contestants = [
            Contestant("memcpy", lambda: dataplane.memcpy(target, source)),
            Contestant("put_state_dict", _done(lambda: ts.put_state_dict(state, "put"))),
            Contestant("put_state_dict, copies=2", _done(lambda: ts.put_state_dict(state, "put twice", copies=2))),
            Contestant("dcp.save, store", lambda: save(state, storage_writer=StoreWriter("saved"))),
            Contestant("dcp.save, store, copies=2", lambda: save(state, storage_writer=StoreWriter("two", copies=2))),
            Contestant("dcp.save, tmpfs", lambda: save(state, storage_writer=_files(directory))),
            Contestant("get_state_dict", _done(lambda: ts.get_state_dict("put", into))),
            Contestant("get_state_dict, copies=2", _done(lambda: ts.get_state_dict("put twice", into))),
            Contestant("dcp.load, store", lambda: load(into, storage_reader=StoreReader("saved"))),
            Contestant("dcp.load, tmpfs", lambda: load(into, storage_reader=FileSystemReader(directory))),
        ]
        samples = interleave(contestants, Schedule(iterations=workload.rounds, warmup=3))
    expected = workload.state(1.0)
    if any(not torch.equal(into["model"][name], value) for name, value in expected["model"].items()):
        raise BenchmarkError("what was loaded is not what was saved")
    asyncio.run(ts.shutdown())
    rates = {name: [workload.nbytes / ns for ns in taken.kept_ns()] for name, taken in samples.items()}
    ceiling = Result.from_samples("memcpy", "GB/s", rates["memcpy"]).as_reference()
    return [Result.from_samples(name, "GB/s", rate, reference=ceiling) for name, rate in rates.items()]


def _files(directory: str) -> FileSystemWriter:
    return FileSystemWriter(directory, sync_files=False)


def _done(make: Callable[[], Coroutine[Any, Any, object]]) -> Callable[[], object]:
    """A call that runs the coroutine of ``make`` to its end, as a script without an event loop does."""
    return lambda: asyncio.run(make())


def _table(rows: Sequence[Result]) -> Table:
    title = "checkpoints, each a state dict"
    table = output.plain_table(title, "what", "n", "p50 GB/s", "of memcpy", left=("what",))
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.name, str(row.n), output.significant(row.value), ratio)
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
