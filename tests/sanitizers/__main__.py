"""Build the compiled modules with a sanitizer in a copy of the tree, and run tests there.

python -m tests.sanitizers address TEST ... [pytest's options]
python -m tests.sanitizers thread TEST ... [pytest's options]

The modules are built once, and anew when what they are made of changes. Before the tests a fault is planted, and the
command fails if it is not reported.
"""

import subprocess
import sys
from types import ModuleType

from tests.sanitizers import address, thread
from tests.sanitizers.instrumented import build

KINDS: dict[str, ModuleType] = {"address": address, "thread": thread}


def main() -> int:
    """See above."""
    if len(sys.argv) < 2 or sys.argv[1] not in KINDS:
        sys.exit(f"which sanitizer: {' or '.join(KINDS)}?")
    kind, arguments = KINDS[sys.argv[1]], sys.argv[2:]
    environment = build(kind.TREE, kind.FLAGS) | kind.environment()
    kind.see_that_it_sees(environment)
    options = ["-p", "no:cacheprovider", "--timeout", "300"]
    if kind.LEFT_OUT:
        options += ["-k", " and ".join(f"not {name}" for name in kind.LEFT_OUT)]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    tests = subprocess.run(command, cwd=kind.TREE, env=environment, check=False).returncode
    return kind.verdict(tests)


if __name__ == "__main__":
    sys.exit(main())
