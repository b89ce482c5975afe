"""``python -m benchmarks.weight_sync``."""

import sys

from benchmarks.weight_sync.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prog="python -m benchmarks.weight_sync"))
