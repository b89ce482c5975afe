"""A job that works without a pause and checks each of its results: ``python -m tests.security.job [--servers]``.

It has actors, buffers of both kinds of memory, a store, and, where asked, an actor server with the metadata service,
and a dashboard. It says how each round went in a line of JSON, and ends with its standard input.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from typing import Any

import numpy as np
import torch

from skipper import torchstore
from skipper.control import Actor, endpoint, serve_job, this_host
from skipper.control.observe import serve_dashboard
from skipper.control.rpc import (
    ActorServer,
    FixedResolver,
    MetadataMapping,
    MetadataResolver,
    MetadataServer,
    RpcClient,
    namespace,
)
from skipper.control.runtime import current_runtime as runtime
from skipper.dataplane import RDMABuffer, empty_array

DEADLINE_S = 30.0
"""Of each call: on a busy machine it still says whether somebody starves."""
ITEMS = 1 << 16
CANARY = b"what-nobody-else-may-read-9e1c"
"""At the beginning of every buffer: the attacker looks for it in whatever it gets to read."""


def numbers(seed: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """What a buffer holds: the canary, and bytes that follow from the seed."""
    content = np.random.default_rng(seed).integers(0, 256, ITEMS, dtype=np.uint8)
    content[: len(CANARY)] = np.frombuffer(CANARY, np.uint8)
    return content


class Owner(Actor):
    """Has memory that others read and write; each process has other numbers."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.shared = empty_array((ITEMS,), "uint8")
        self.plain = numbers(seed)
        self.shared[:] = self.plain
        self.board = np.zeros(ITEMS, np.uint8)
        self.buffers = [RDMABuffer(memory, writable=False) for memory in (self.shared, self.plain)]
        self.writable = RDMABuffer(self.board)

    @endpoint
    def share(self) -> list[RDMABuffer]:
        """Handles of both kinds of memory, and of what may be written."""
        return [*self.buffers, self.writable]

    @endpoint
    def read(self, buffers: list[RDMABuffer], seed: int) -> bool:
        """Whether another's buffers hold what they should, and take what is written."""
        into = np.empty(ITEMS, np.uint8)
        for buffer in buffers[:2]:
            buffer.read_into(into, timeout=DEADLINE_S).get()
            if not (into == numbers(seed)).all():
                return False
        written = np.full(ITEMS, seed % 251, np.uint8)
        buffers[2].write_from(written, timeout=DEADLINE_S).get()
        buffers[2].read_into(into, timeout=DEADLINE_S).get()
        return bool((into == written).all())

    @endpoint
    def is_intact(self) -> bool:
        """Whether nobody has written to what is not to be written."""
        return bool((self.shared == numbers(self.seed)).all() and (self.plain == numbers(self.seed)).all())


class Calculator:
    """On the actor server."""

    def __init__(self) -> None:
        self.notes = 0

    def add(self, left: int, right: int) -> int:
        """A sum."""
        return left + right

    def note(self) -> int:
        """How often this has been called; somebody does once, in the hearing of the attacker."""
        self.notes += 1
        return self.notes

    def noted(self) -> int:
        """How often `note` has been called."""
        return self.notes


async def work(*, servers: bool, page: bool) -> None:
    """Set everything up, say what there is, and go round until the end of the input."""
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    seed = 7
    owners = this_host().spawn_procs({"gpus": 2}, name="workers").spawn("owner", Owner, seed)
    first, second = owners.slice(gpus=0), owners.slice(gpus=1)
    buffers = second.share.call_one().get(DEADLINE_S)
    await torchstore.initialize()
    weights = {"layer.weight": torch.arange(4096, dtype=torch.float32), "layer.bias": torch.ones(64)}
    await torchstore.put_state_dict(weights, "policy")
    with contextlib.ExitStack() as stack:
        stack.enter_context(serve_job(f"attacked-{os.getpid()}"))
        addresses: dict[str, str] = {}
        clients = []
        if servers:
            names = stack.enter_context(MetadataServer())
            server = stack.enter_context(ActorServer("127.0.0.1", 0, MetadataMapping(names.address)))
            server.register("calculator", Calculator())
            addresses = {"metadata": names.address, "actors": server.address}
            direct = FixedResolver(f"actor://{server.address}/calculator")
            for resolver in (MetadataResolver(names.address), direct):
                client = RpcClient(resolver, Calculator, name="calculator").with_options(timeout=DEADLINE_S)
                clients.append(stack.enter_context(client))
        if page:
            addresses["page"] = stack.enter_context(serve_dashboard()).url
        report = {"pid": os.getpid(), "addresses": addresses, "secret": runtime.current().secret.hex()}
        report["namespace"] = namespace()
        say(report | {"handles": [buffer.serialize().hex() for buffer in buffers], "me": runtime.current().me.id})
        rounds = 0
        while not over.is_set():
            times = [time.monotonic()]
            failed = []
            if not first.read.call_one(buffers, seed).get(DEADLINE_S):
                failed.append("a read or a write between the actors was wrong")
            if not all(owners.is_intact.call().get(DEADLINE_S)):
                failed.append("a buffer has been written by somebody else")
            times.append(time.monotonic())
            live = {name: torch.zeros_like(value) for name, value in weights.items()}
            await asyncio.wait_for(torchstore.get_state_dict("policy", live), DEADLINE_S)
            if not all(torch.equal(live[name], weights[name]) for name in weights):
                failed.append("the store gave something else")
            times.append(time.monotonic())
            if any(client.add.sync(rounds, 1) != rounds + 1 for client in clients):
                failed.append("the actor server answered something else")
            times.append(time.monotonic())
            rounds += 1
            parts = dict(zip(("actors", "store", "servers"), np.diff(times).tolist(), strict=True))
            say({"round": rounds, "took_s": times[-1] - times[0], "parts": parts, "failed": failed})
    await torchstore.shutdown()


def say(report: dict[str, Any]) -> None:
    """A line of JSON."""
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a job to attack")
    parser.add_argument("--servers", action="store_true", help="an actor server and the metadata service, too")
    parser.add_argument("--page", action="store_true", help="a dashboard, too")
    given = parser.parse_args()
    asyncio.run(work(servers=given.servers, page=given.page))
