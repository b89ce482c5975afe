"""``python -m skipper.benchmarks.scale``."""

import sys

from skipper.benchmarks.scale.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prog="python -m skipper.benchmarks.scale"))
