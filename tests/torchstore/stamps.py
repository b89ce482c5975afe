"""Many publishes against many readers: every element of a version bears its number, so that a mixture shows.

The publisher writes all its elements anew for each version, as an optimizer would; readers compare every element
of what they read with the number of the version that the store says it is.

    python -m tests.torchstore.stamps --publishes 1000 --readers 8
"""

import argparse
import asyncio
import json
import sys
import time
from typing import Any, get_args

from skipper import torchstore as ts
from skipper.control import shutdown, this_host
from skipper.torchstore.algebra.manifest import Mode
from tests.torchstore.actors import Peer


async def run(publishes: int, readers: int, mode: Mode) -> dict[str, Any]:
    """One publisher, many readers.

    Raises:
        ActorError: A reader has found an element of another version.
    """
    procs = this_host().spawn_procs(per_host={"gpus": readers + 1})
    await ts.initialize()
    try:
        peers = procs.spawn("peers", Peer)
        begin = time.perf_counter()
        reading = peers.slice(gpus=slice(1, None)).read_many.call("stamped", publishes)
        await peers.slice(gpus=0).publish_many.call_one("stamped", publishes, mode)
        seen = list(await reading)
        return {
            "mode": mode,
            "publishes": publishes,
            "readers": readers,
            "versions_read": sum(len(versions) - 1 for versions in seen),
            "mixed": 0,  # a reader that finds one raises
            "seconds": round(time.perf_counter() - begin, 1),
        }
    finally:
        await ts.shutdown()
        await procs.stop()


def main() -> None:
    """Run both modes; print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--publishes", type=int, default=1000)
    parser.add_argument("--readers", type=int, default=8)
    options = parser.parse_args()
    try:
        for mode in get_args(Mode):
            print(json.dumps(asyncio.run(run(options.publishes, options.readers, mode))), flush=True)
    finally:
        shutdown()


if __name__ == "__main__":
    sys.exit(main())
