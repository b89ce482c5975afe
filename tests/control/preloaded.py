"""What tests have imported before their processes are forked."""

import os

PID = os.getpid()
"""Of the process that has imported this."""
MODE = os.environ.get("PRELOADED_MODE", "")
