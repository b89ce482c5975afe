"""``python -m skipper.benchmarks.gpu``."""

import sys

from skipper.benchmarks.gpu.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
