"""AddressSanitizer and UndefinedBehaviorSanitizer: memory that is not there, and C that means nothing.

Any fault that they see ends the process in which it happens with a report, and so the test. CPython's own leaks are
not looked at.
"""

import sys

from tests.sanitizers.instrumented import bare_cma, library, run_planted
from tests.tree import ROOT

TREE = ROOT / "build" / "asan"
FLAGS = "-fsanitize=address,undefined"
LEFT_OUT = ("leave_nothing", "comes_and_goes")
"""In the names of tests that compare the memory of processes before and after: a sanitizer keeps what is freed."""

_FAULT = """
import ctypes
from skipper.dataplane._copy import store_word
malloc = ctypes.CDLL(None).malloc
malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
store_word(malloc(64) + 64, 1)
"""


def environment() -> dict[str, str]:
    """What makes the sanitizers work in a Python that was built without them."""
    # Their libraries have to be loaded first, and that of C++ exceptions with them, or its are not seen.
    libraries = [bare_cma(TREE), *(library(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so"))]
    report = "halt_on_error=1:abort_on_error=1"
    return {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": f"{report}:detect_leaks=0:handle_segv=0:verify_asan_link_order=0",
        "UBSAN_OPTIONS": f"{report}:print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # Python's own allocator would hide where an object ends
        "UCX_MEM_EVENTS": "n",  # UCX patches malloc, which is the sanitizer's
    }


def see_that_it_sees(environment: dict[str, str]) -> None:
    """Have the compiled code write behind an allocation, and stop where that is not reported."""
    ran = run_planted(TREE, _FAULT, environment)
    if ran.returncode == 0 or "heap-buffer-overflow" not in ran.stderr or "_copy" not in ran.stderr:
        sys.exit(f"the sanitizers do not see a fault that was planted:\n{ran.stderr or ran.stdout}")


def verdict(tests: int) -> int:
    """The exit status of all of it: that of the tests, which a report has ended."""
    return tests
