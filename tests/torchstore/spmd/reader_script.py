"""Joins a job, reads a key of its store, and keeps the lease until it is killed: ``reader_script.py JOIN_FILE``."""

import asyncio
import signal
import sys

from skipper import control
from skipper import torchstore as ts
from skipper.torchstore.protocol.messages import Selector


async def read() -> None:
    control.join(sys.argv[1])
    grant = await (await ts.client()).remote.acquire("policy", Selector(), (), 20.0)
    print("reads", grant.version, flush=True)
    signal.pause()


asyncio.run(read())
