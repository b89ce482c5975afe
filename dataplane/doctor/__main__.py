"""``python -m skipper.dataplane.doctor``, the same as ``skipper doctor``."""

import sys

from skipper.dataplane.doctor.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prog="python -m skipper.dataplane.doctor"))
