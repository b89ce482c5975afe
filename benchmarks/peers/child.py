"""A peer's process: ``python -m skipper.benchmarks.peers.child SCRIPT FAMILY``, with requests on standard input.

A script is a module of `benchmarks.peers.scripts` with ``open_blocks(family, stack)``, which starts what the family
needs, registers its end with the stack, and returns how each row is done; and ``CANNOT``, why it has no other rows.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence

from skipper.benchmarks.peers.protocol import private_stdout, serve

__all__ = ["main"]


def main(arguments: Sequence[str]) -> None:
    """Be the peer until standard input ends."""
    script_name, family = arguments
    answers = private_stdout()
    script = importlib.import_module(f"skipper.benchmarks.peers.scripts.{script_name}")
    with contextlib.ExitStack() as stack:
        serve(script.open_blocks(family, stack), script.CANNOT, answers)


if __name__ == "__main__":
    main(sys.argv[1:])
