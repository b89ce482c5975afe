"""``python -m skipper``, the same as the command ``skipper``."""

import sys

from skipper.cli.main import main

sys.exit(main())
