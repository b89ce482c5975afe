"""Processes of tests that import torch: forked from one that has done so, in the tests' own process and in scripts.

It takes a folder's fixture to have it so; the other folders start their processes the plain way, and so does whatever
runs with an environment of its own.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping

from skipper.control.model.settings import PRELOAD_VARIABLE


@contextlib.contextmanager
def preloading(*modules: str) -> Iterator[None]:
    """Have processes that are spawned within find these modules imported, unless the environment names others."""
    if PRELOAD_VARIABLE in os.environ:
        yield
        return
    os.environ[PRELOAD_VARIABLE] = ",".join(modules)
    try:
        yield
    finally:
        del os.environ[PRELOAD_VARIABLE]


def plainly(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without that."""
    return {name: value for name, value in environment.items() if name != PRELOAD_VARIABLE}
