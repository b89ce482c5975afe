"""``skipper host`` without the command ``skipper``: ``python -m control.hosts``, or this file, wherever that lies."""

import os
import sys

if not __package__:  # run as a file: its folder's place on the path goes to the folder that holds the package
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from control.hosts.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
