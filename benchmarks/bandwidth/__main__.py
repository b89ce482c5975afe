"""``python -m skipper.benchmarks.bandwidth``, the same as ``skipper bw``."""

import sys

from skipper.benchmarks.bandwidth.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prog="python -m skipper.benchmarks.bandwidth"))
