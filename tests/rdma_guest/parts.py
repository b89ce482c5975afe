"""All tests that need an RDMA device: `python -m tests.rdma_guest.parts [PART...] [-- PYTEST OPTIONS]`.

Each part has a guest kernel of its own, with which goes what its tests did to devices and links. Two run at a time,
since a guest has one processor. What a part prints is shown when it has ended.

A test that takes too long ends its part by itself, with the stacks of all threads. Where not even that happens any more
the guest's kernel has stopped: once in some ten runs of the short parts, so far, Soft-RoCE of Linux 6.1 spins after
links were cut under atomic operations. That is said, and the part gets a second kernel; a second stop is a failure.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUEST = Path(__file__).with_name("guest")
TEST_S = 90  # some twenty times what the longest test takes on an idle machine
PART_S = 420  # some five times what the longest part takes there
KERNELS = 2
OUT_OF_TIME = 124
NOTHING_CHOSEN = 5  # pytest's own
SHORT_NBYTES = 6000

PYTEST = (
    *("-m", "pytest", "-m", "verbs", "--color=no"),
    # Each test's name before it runs: a kernel that hangs tells nothing any more.
    *("-v", "-o", "verbosity_assertions=0"),
    # The second limit is for a thread that keeps Python's lock for ever.
    *("-o", f"timeout={TEST_S}"),
    *("-o", f"faulthandler_timeout={TEST_S + 10}", "-o", "faulthandler_exit_on_timeout=true"),
)
HUSHED = ("CI", "BUILD_NUMBER")
"""Variables that make pytest show whole diffs, which takes minutes for what a failed transfer leaves."""


Part = Sequence[str]
"""Files or folders of tests."""


def parts() -> list[Part]:
    """The tests of this project that need a device, those that take longest first; short files share a guest."""
    files = sorted(Path(__file__).parent.glob("test_*.py"), key=lambda file: -file.stat().st_size)
    files = [file for file in files if "pytest.mark.verbs" in file.read_text("utf-8")]
    long = [[str(file.relative_to(ROOT))] for file in files if file.stat().st_size >= SHORT_NBYTES]
    short = [str(file.relative_to(ROOT)) for file in files if file.stat().st_size < SHORT_NBYTES]
    return [["tests/conformance"], *long, short]


def run(part: Part, options: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """One part in a guest, or in another one if the kernel of the first has stopped: its status and what it printed."""
    for left in reversed(range(KERNELS)):
        status, output = run_once(part, options, environment)
        if status != OUT_OF_TIME or not left:
            break
        print(output, flush=True)
        last = last_started(output)
        print(f"=== {' '.join(part)}: the kernel has stopped at {last}; begun again in another", flush=True)
    return status, output


def run_once(part: Part, options: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """One part in one guest: its status and what it printed."""
    command = [str(GUEST), "run", "--two-hosts", "--timeout", str(PART_S), sys.executable, *PYTEST, *options, *part]
    print(f"=== {' '.join(part)}: begun", flush=True)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, check=False)
        output.seek(0)
        return done.returncode, output.read()


def last_started(output: str) -> str:
    """The test that pytest named last."""
    return next(iter(re.findall(r"^\S+::\S+", output, re.MULTILINE)[::-1]), "none")


def main() -> int:
    own, options = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, options = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(prog="python -m tests.rdma_guest.parts", description=__doc__)
    parser.add_argument("parts", nargs="*", help="files or folders of tests (default: all that need a device)")
    parser.add_argument("--at-once", type=int, default=min(2, os.cpu_count() or 1), help="guests that run at a time")
    given = parser.parse_args(own)
    environment = {name: value for name, value in os.environ.items() if name not in HUSHED}
    subprocess.run([GUEST, "build"], check=True)  # once, before two of them want to
    begin = time.monotonic()
    failed = []
    with ThreadPoolExecutor(given.at_once) as pool:
        wanted = [[part] for part in given.parts] or parts()
        running = {pool.submit(run, part, options, environment): " ".join(part) for part in wanted}
        for done in as_completed(running):
            part, (status, output) = running[done], done.result()
            print(f"=== {part}: status {status}, {time.monotonic() - begin:.0f} s after the start", flush=True)
            print(output, flush=True)
            if status and not (status == NOTHING_CHOSEN and options):
                failed.append(part)
            if status == OUT_OF_TIME:
                last = last_started(output)
                print(f"=== {part} took longer than {PART_S} s, {KERNELS} times; the last test was {last}", flush=True)
    print(f"=== {len(running) - len(failed)} of {len(running)} parts passed in {time.monotonic() - begin:.0f} s")
    for part in failed:
        print(f"=== failed: {part}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
