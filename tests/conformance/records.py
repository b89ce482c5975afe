"""What a fault gave its caller and after how long, written down while the tests provoke it.

`docs/reference/transfer_faults.md` has a table of faults that `fault_table.py` makes of these records. A test
that provokes one of them says so:

    with pytest.raises(OwnerDiedError), provoke(Fault.KILLED_BEFORE, "shm"):
        buffer.read_into(memory).get()

With `--fault-record PATH` every such block adds a line to that file. Without it the outcome is held against the table
as it was committed, so that the table cannot go stale unnoticed.
"""

import enum
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.conformance import fault_table

OPTION = "--fault-record"
SUCCEEDS = "succeeds"


class Fault(enum.Enum):
    """The rows of the table, in its order, with their labels."""

    DROPPED = "owner dropped the buffer"
    FREED = "its memory was freed in the owner"
    DROPPED_DURING_READ = "dropped during a read"
    DROPPED_DURING_WRITE = "dropped during a write"
    KILLED_AT_FIRST_USE = "owner killed before the first use"
    KILLED_BEFORE = "owner killed between two uses"
    KILLED_DURING_READ = "owner killed during a read"
    KILLED_DURING_WRITE = "owner killed during a write"
    RESTARTED = "owner restarted, old handle"
    RESTARTED_IN_PLACE = "the same, and the successor has its pid or its address"
    FROZEN_AT_FIRST_READ = "owner frozen (SIGSTOP) before anybody connected, a read"
    FROZEN_AT_FIRST_WRITE = "the same, a write"
    FROZEN_BEFORE_READ = "owner frozen, a later read"
    FROZEN_BEFORE_WRITE = "owner frozen, a later write"
    THAWED = "owner continued (SIGCONT), the next use"
    WRITER_KILLED = "a peer killed during its write, the next use by another"
    LINK_CUT_BEFORE = "link cut before, deadline later than the retries"
    LINK_CUT_DURING = "link cut during a read"
    LINK_CUT_DURING_WRITE = "link cut during a write"
    LINK_CUT_SHORT = "link cut, deadline sooner than the retries"
    LINK_CUT_AT_FIRST_USE = "link cut at the first use"
    LINK_HEALED = "link healed, the next use"
    DEADLINE = "the deadline passes during a large transfer"
    ATOMIC_DROPPED = "atomic on a dropped buffer"
    ATOMIC_KILLED = "atomic, owner killed"
    ATOMIC_FROZEN = "atomic, owner frozen"
    ATOMIC_LINK_CUT = "atomic, link cut"
    NO_WAY = "no way from here"
    DAMAGED = "damaged or foreign handle"
    FORKED = "used before a fork, handle used in the child"
    NO_DESCRIPTORS = "owner registers with no file descriptor left"
    NO_MEMORY = "owner allocates with no address space left"
    NO_LOCKED_MEMORY = "more memory than may be locked"
    READER_NO_DESCRIPTORS = "reader meets the owner with no file descriptor left"
    READER_NO_MEMORY = "reader meets the owner with no address space left"
    GARBAGE = "garbage sent to the owner's socket, the next use"


@dataclass(frozen=True, slots=True)
class Record:
    """One fault as its caller met it.

    Attributes:
        fault: Name of the `Fault`.
        backend: Name of the column: a key of `fault_table.COLUMNS`.
        outcome: Class of the error, or "succeeds".
        seconds: From the fault (or the call, if that came later) to the answer.
        deadline_s: The timeout that the caller had given, where it matters.
    """

    fault: str
    backend: str
    outcome: str
    seconds: float
    deadline_s: float | None


class Clock:
    """When the fault happened; until somebody knows better, when this was made."""

    def __init__(self) -> None:
        self.begin = time.monotonic()

    def start(self) -> None:
        """The fault happens now."""
        self.begin = time.monotonic()


Provoke = Callable[..., AbstractContextManager[Clock]]


class Recorder:
    """Times the blocks of one test session; `provoke` of the fixtures is its `__call__`."""

    def __init__(self, file: Path | None, table: fault_table.Table) -> None:
        self._file = file
        self._table = table

    @contextmanager
    def __call__(
        self, fault: Fault, backend: str, *, deadline_s: float | None = None, clock: Clock | None = None
    ) -> Iterator[Clock]:
        """Note what the block raises, or that it raises nothing.

        Args:
            fault: What is provoked.
            backend: A key of `fault_table.COLUMNS`.
            deadline_s: The timeout of the operation, if it is what may end it.
            clock: One that something outside the block starts; by default time counts from the block's beginning.
        """
        if backend not in fault_table.COLUMNS:
            raise KeyError(f"{backend!r} is no column of the table of faults")
        clock = clock or Clock()
        outcome = SUCCEEDS
        try:
            yield clock
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            self._note(Record(fault.name, backend, outcome, time.monotonic() - clock.begin, deadline_s))

    def _note(self, record: Record) -> None:
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(record)) + "\n")
            return
        allowed = self._table.outcomes(Fault[record.fault].value, record.backend)
        if allowed and record.outcome not in allowed:
            raise AssertionError(
                f"{fault_table.PAGE.name} says {' or '.join(sorted(allowed))} for {Fault[record.fault].value!r} over "
                f"{record.backend}, here it was {record.outcome}"
            )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, metavar="PATH", help="add what faults gave to this file (JSON lines)")


@pytest.fixture(scope="session")
def provoke(pytestconfig: pytest.Config) -> Recorder:
    """`with provoke(Fault.X, backend): ...` around what meets the fault."""
    chosen = pytestconfig.getoption(OPTION)
    return Recorder(Path(chosen) if chosen else None, fault_table.committed())
