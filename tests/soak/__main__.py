"""Mixed operations over all backends of one machine at once, while owners are killed and stopped, and buffers dropped.

    python -m tests.soak --operations 1000000

Every byte read is compared, every error needs a fault that explains it, every operation has to end by its deadline, and
nothing may be left or have grown at the end. Prints a summary as JSON; the status is 1 where something was wrong, 3
where nothing moved any more.
"""

import argparse
import json
import sys
from dataclasses import asdict

from skipper import dataplane
from tests.reach import TCP_TOO
from tests.soak.run import Soak


def main() -> int:
    """Run it as the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operations", type=int, default=1_000_000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of every choice but the timing (default: %(default)s)")
    parser.add_argument("--seconds-limit", type=float, default=float("inf"), help="end sooner, after so many seconds")
    parser.add_argument("--corrupt", action="store_true", help="flip bits behind its back: it has to notice")
    given = parser.parse_args()
    dataplane.configure(ucx=TCP_TOO)  # some owners are reached over TCP alone
    soak = Soak(operations=given.operations, seed=given.seed, seconds_limit=given.seconds_limit, corrupt=given.corrupt)
    summary = soak.run()
    print(json.dumps(asdict(summary), indent=2))
    return 0 if summary.ok else 1


if __name__ == "__main__":
    sys.exit(main())
