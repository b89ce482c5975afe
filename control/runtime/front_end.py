"""The front end of this process: a script by itself, a person at a prompt or in a notebook, or pytest.

A failure that nobody has heard of ends a script. A prompt, a kernel and a run of tests continue: there the failure is
raised in the code that the user runs at that moment, if that can be found out, and is printed otherwise.
"""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

_TEST_VARIABLE = "PYTEST_CURRENT_TEST"
_CALLS_OF_USERS = {
    "pytest_pyfunc_call": "_pytest",
    "call_fixture_func": "_pytest",
    "runtest": "_pytest",
    "run_code": "interactiveshell.py",
}
"""Functions that call the user's code, and a part of the path of their file."""


def is_script() -> bool:
    """Whether this process may end by itself. The runtime asks when it starts, and when something fails."""
    return not (_is_prompt() or _is_pytest())


def running_test() -> str:
    """The test that pytest calls at the moment; empty elsewhere, and while fixtures are set up or torn down."""
    test, _, phase = os.environ.get(_TEST_VARIABLE, "").rpartition(" ")
    return test if phase == "(call)" and "pytest" in sys.modules else ""


def runs_users_code(frame: FrameType | None) -> bool:
    """Whether a frame of the main thread belongs to what the user runs, so that an exception there is shown as theirs.

    False at an empty prompt, between tests, and in an ``await`` of a notebook's cell, which the kernel's own loop runs.
    """
    is_plain_prompt = _is_prompt() and not _is_ipython()
    main = vars(sys.modules["__main__"])
    while frame is not None:
        place = _CALLS_OF_USERS.get(frame.f_code.co_name)
        if place is not None and place in frame.f_code.co_filename:
            return True
        if is_plain_prompt and frame.f_globals is main:
            return True
        frame = frame.f_back
    return False


def tell(report: str) -> None:
    """Report a failure that cannot be raised: on standard error, and in pytest's summary of warnings."""
    sys.stderr.write(f"{report}\n")
    sys.stderr.flush()
    if _is_pytest():
        try:
            warnings.warn(report, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:
            return  # warnings are errors here, but this thread runs no test; the report is written already


def _is_pytest() -> bool:
    # The environment is not enough: processes that a test starts have it, too. And a run stays one until its end.
    global _has_been_pytest
    if "pytest" in sys.modules and (_TEST_VARIABLE in os.environ or "PYTEST_VERSION" in os.environ):
        _has_been_pytest = True
    return _has_been_pytest


_has_been_pytest = False


def _is_prompt() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or _is_ipython()


def _is_ipython() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None
