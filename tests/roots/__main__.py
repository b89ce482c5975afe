"""Run the core of the suite with other Pythons and on other processors, in Debian roots.

python -m tests.roots 3.13 3.14 [-- pytest's arguments]

The roots are made once, which takes root, the network and some minutes; the tree is copied into them and built there.
pip brings torch with CUDA, some gigabytes: for these Pythons PyPI has nothing else. The root for 3.14 has the newest
release of every package; in the one for arm64, which is emulated, the compiled modules are tested.
"""

import argparse
import signal
import sys

from tests.roots.cross import CrossError
from tests.roots.emulation import EmulationError
from tests.roots.root import Root, RootError, check_machine
from tests.tree import CORE

COMPILED = (
    "tests/conformance",
    "tests/dataplane/test_atomic.py",
    "tests/dataplane/test_layout.py",
    "tests/control/model/test_future.py",
    "tests/control/model/test_future_state.py",
    "tests/control/wire/test_frames.py",
    "tests/control/wire/test_local_stream.py",
    "tests/control/wire/test_plain.py",
    "tests/control/wire/test_poller.py",
    "tests/control/wire/test_readv.py",
    "tests/control/wire/test_short_frames.py",
    "tests/control/wire/test_transport.py",
)
"""What tries the compiled modules, and the order of memory that they rely on."""

# torch 2.9 is the last for arm64 that comes without CUDA.
ROOTS = {
    root.name: root
    for root in (
        Root("3.13", "trixie", "amd64", CORE, "2.13.0"),
        Root("3.14", "sid", "amd64", CORE, None),
        Root("arm64", "trixie", "arm64", COMPILED, "2.9.1"),
    )
}


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(prog="python -m tests.roots", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("roots", nargs="+", choices=ROOTS, metavar="root", help=f"of {', '.join(ROOTS)}")
    own, arguments = _divided(sys.argv[1:])
    chosen = [ROOTS[name] for name in parser.parse_args(own).roots]
    statuses: dict[str, str] = {}
    # What was mounted and registered with the kernel is taken back then too.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        check_machine()
        for root in chosen:
            statuses[root.name] = _tried(root, arguments)
    except (RootError, CrossError, EmulationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, status in statuses.items():
        print(f"{name}: {status}")
    return int(any(status != "passed" for status in statuses.values()))


def _tried(root: Root, arguments: list[str]) -> str:
    with root.held():
        root.prepare()
        print(f"{root.name}: {root.suite}, {root.architecture}", flush=True)
        status = root.test(arguments)
    return "passed" if status == 0 else f"failed: pytest ended with {status}"


def _divided(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands before ``--``, and what stands after it."""
    where = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:where], arguments[where + 1 :]


if __name__ == "__main__":
    sys.exit(main())
