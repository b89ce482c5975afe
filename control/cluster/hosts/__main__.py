"""``skipper host`` without the command: ``python -m skipper.control.cluster.hosts``, or this file, wherever it is."""

import os
import sys

if not __package__:  # it runs as a file: on the path, the folder that holds the package replaces its folder
    sys.path[0] = os.path.abspath(os.path.join(__file__, *[os.pardir] * 5))

from skipper.control.cluster.hosts.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
