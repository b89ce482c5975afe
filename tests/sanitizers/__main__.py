"""Build the compiled modules with sanitizers in a copy of the tree, and run tests there.

python -m tests.asan TEST ... [pytest's options]

The modules are built once, and anew when what they are made of changes. Any fault that a sanitizer sees ends the
process in which it happens with a report, and so the test. CPython's own leaks are not looked at.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.tree import ROOT, copy_tree

TREE = ROOT / "build" / "asan"
_SANITIZERS = "-fsanitize=address,undefined"
_BARE_CMA = Path(__file__).parent / "bare_cma.c"
_FAULT = """
import ctypes
from skipper.dataplane._copy import store_word
malloc = ctypes.CDLL(None).malloc
malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
store_word(malloc(64) + 64, 1)
"""
_MEASURE_MEMORY = ("leave_nothing", "comes_and_goes")
"""In the names of tests that compare the memory of processes before and after: a sanitizer keeps what is freed."""


def main() -> int:
    """See above."""
    copy_tree(TREE)
    environment = {**os.environ, "PYTHONPATH": f"{TREE / 'src'}:{TREE}"}
    flags = f"{_SANITIZERS} -fno-omit-frame-pointer -g1 -O1"
    build = {**environment, "CFLAGS": flags, "LDFLAGS": _SANITIZERS}
    subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=TREE, env=build, check=True)
    without = " and ".join(f"not {name}" for name in _MEASURE_MEMORY)
    options = ["-p", "no:cacheprovider", "--timeout", "300", "-k", without]
    environment |= _under_sanitizers()
    _see_that_it_sees(environment)
    command = [sys.executable, "-m", "pytest", *options, *sys.argv[1:]]
    return subprocess.run(command, cwd=TREE, env=environment, check=False).returncode


def _see_that_it_sees(environment: dict[str, str]) -> None:
    """Have the compiled code write behind an allocation, and stop where that is not reported."""
    command = [sys.executable, "-c", _FAULT]
    ran = subprocess.run(command, cwd=TREE, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode == 0 or "heap-buffer-overflow" not in ran.stderr or "_copy" not in ran.stderr:
        sys.exit(f"the sanitizers do not see a fault that was planted:\n{ran.stderr or ran.stdout}")


def _under_sanitizers() -> dict[str, str]:
    # Python itself is not built with them: their libraries have to be loaded first, and that of C++ exceptions with
    # them, or its are not seen.
    libraries = [_bare_cma(), *(_library(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so"))]
    report = "halt_on_error=1:abort_on_error=1"
    return {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": f"{report}:detect_leaks=0:handle_segv=0:verify_asan_link_order=0",
        "UBSAN_OPTIONS": f"{report}:print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # Python's own allocator would hide where an object ends
        "UCX_MEM_EVENTS": "n",  # UCX patches malloc, which is the sanitizer's
    }


def _bare_cma() -> str:
    """Build what hides the sanitizer's `process_vm_readv`; see there."""
    library = TREE / "bare_cma.so"
    command = [_compiler(), "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(_BARE_CMA)]
    subprocess.run(command, check=True)
    return str(library)


def _library(name: str) -> str:
    compiler = _compiler()
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = found.stdout.strip()
    if not os.path.isabs(path):
        sys.exit(f"{compiler} has no {name}: install its sanitizers (Debian: apt-get install libgcc-12-dev)")
    return path


def _compiler() -> str:
    return os.environ.get("CC", "gcc")


if __name__ == "__main__":
    sys.exit(main())
