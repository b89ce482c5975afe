"""``python -m skipper.benchmarks.peers``."""

import signal
import sys

from skipper.benchmarks.peers.command import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as an interrupted run does, with its folders
    sys.exit(main(sys.argv[1:], prog="python -m skipper.benchmarks.peers"))
