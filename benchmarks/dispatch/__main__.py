"""``python -m skipper.benchmarks.dispatch``, the same as ``skipper dispatch``."""

import sys

from skipper.benchmarks.dispatch.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prog="python -m skipper.benchmarks.dispatch"))
