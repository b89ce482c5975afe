"""What every folder of tests has: how faults are recorded, Ctrl-C as on a terminal, time for examples of hypothesis."""

import signal

from hypothesis import settings

import dataplane
from tests.conformance.records import provoke, pytest_addoption

__all__ = ["provoke", "pytest_addoption"]

settings.register_profile("skipper", deadline=None)  # a busy machine is no failure
settings.load_profile("skipper")

# A shell starts what it runs in the background with SIGINT ignored, and every program that a test starts inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# These processes read from owners of every kind, those that are told to be reached over TCP among them.
dataplane.configure(ucx={"NET_DEVICES": "lo"})
