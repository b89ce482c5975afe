"""ThreadSanitizer: accesses of two threads to one place in memory of which none comes before the other.

It sees what the compiled modules do, what they and all others do through functions of the C library (memcpy, free,
read), and every lock. Python, torch and UCX are not built with it: of their own atomics it knows nothing, so that some
of what they do looks unordered. `unordered_elsewhere.txt` says what is not reported, and why. A process goes on after a
report; all reports are printed when the tests are over, and fail the command.

Threads alone: two processes that share memory are no concern of it. Nor are fences; what rests on them is argued for in
docs/explanation/memory_order.md.
"""

import ctypes
import sys
from pathlib import Path

from tests.sanitizers.instrumented import bare_cma, library, run_planted
from tests.tree import ROOT

TREE = ROOT / "build" / "tsan"
FLAGS = "-fsanitize=thread -Wno-tsan"
LEFT_OUT = ("leave_nothing", "comes_and_goes", "read_nothing_newer", "never_what_came_after")
"""In the names of tests that compare the memory of processes before and after, since a sanitizer has memory of its own;
and of those that read what is being written, and throw it away: each of its words costs a report, suppressed or not."""

_REPORTS = TREE / "reports"
_SUPPRESSED = Path(__file__).parent / "unordered_elsewhere.txt"
_ADDR_NO_RANDOMIZE = 0x0040000  # <linux/personality.h>
_RACE = """
import threading
from skipper.dataplane import _copy
from skipper.dataplane.allocation import empty_array

source, target = (empty_array(1 << 20, "u1") for _ in range(2))
both = threading.Barrier(2)

def write():
    both.wait()
    for _ in range(8):
        _copy.copy(target.ctypes.data, source.ctypes.data, target.nbytes)

threads = [threading.Thread(target=write) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def environment() -> dict[str, str]:
    """What makes the sanitizer work in a Python that was built without it."""
    # It keeps a shadow of the address space, and older versions find no room for one where addresses are chosen at
    # random from more than 2**28. Where a container forbids this, the sanitizer says itself what is wrong.
    ctypes.CDLL(None).personality(_ADDR_NO_RANDOMIZE)
    _REPORTS.mkdir(parents=True, exist_ok=True)
    options = {
        "suppressions": _SUPPRESSED,
        "log_path": _REPORTS / "process",
        "halt_on_error": 0,
        "exitcode": 0,  # the reports count, not how a process ends that a test kills anyway
        "history_size": 7,  # of accesses: a report needs both stacks, or it cannot be told whose it is
        "report_signal_unsafe": 0,  # Python's handlers set a flag
        "report_thread_leaks": 0,  # daemon threads end with the process
        "detect_deadlocks": 0,  # by the order of locks, of which UCX has many of its own
    }
    return {
        "LD_PRELOAD": " ".join([bare_cma(TREE), *(library(name) for name in ("libtsan.so", "libstdc++.so"))]),
        "TSAN_OPTIONS": ":".join(f"{name}={value}" for name, value in options.items()),
        "UCX_MEM_EVENTS": "n",  # UCX patches mmap, which is the sanitizer's
    }


def see_that_it_sees(environment: dict[str, str]) -> None:
    """Have two threads copy to one place, and stop where that is not reported."""
    _take_reports()
    ran = run_planted(TREE, _RACE, environment)
    found = "".join(_take_reports())
    if "data race" not in found or "_copy" not in found:
        sys.exit(f"the sanitizer does not see a race that was planted:\n{found or ran.stderr or ran.stdout}")


def verdict(tests: int) -> int:
    """The exit status of all of it: that of the tests, and 1 where there are reports, which are printed."""
    reports = _take_reports()
    for report in reports:
        print(report)
    if reports:
        print(f"{len(reports)} processes have reports of the sanitizer", file=sys.stderr)
    return tests or bool(reports)


def _take_reports() -> list[str]:
    found = sorted(_REPORTS.glob("process.*"))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in found]
    for path in found:
        path.unlink()
    return [text for text in texts if text.strip()]
