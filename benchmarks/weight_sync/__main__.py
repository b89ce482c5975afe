"""``python -m skipper.benchmarks.weight_sync``."""

import sys

from skipper.benchmarks.weight_sync.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prog="python -m skipper.benchmarks.weight_sync"))
