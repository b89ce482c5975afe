"""``python -m benchmarks.dispatch``, the same as ``skipper dispatch``."""

import sys

from benchmarks.dispatch.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prog="python -m benchmarks.dispatch"))
