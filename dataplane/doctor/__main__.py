"""``python -m dataplane.doctor``, the same as ``skipper doctor``."""

import sys

from dataplane.doctor.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prog="python -m dataplane.doctor"))
