"""``python -m skipper.benchmarks.actors``, the same as ``skipper actors``."""

import sys

from skipper.benchmarks.actors.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prog="python -m skipper.benchmarks.actors"))
