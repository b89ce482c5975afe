"""A job on other machines that works without a pause and checks its results: ``python -m tests.security.far_job ...``.

An actor on each host has memory that the next one reads and writes over the network. It says how each round went in a
line of JSON, and ends with its standard input.
"""

import argparse
import sys
import threading
import time

import numpy as np

from skipper.control import Actor, endpoint, shutdown
from skipper.control.cluster.hosts import attach_to_hosts
from skipper.control.runtime import current_runtime as runtime
from skipper.dataplane import RDMABuffer
from tests.dataplane import stranger
from tests.security.job import DEADLINE_S, ITEMS, Owner, say


class Bait(Actor):
    """Has memory full of one byte, which the stranger looks for in what UCX gives him."""

    def __init__(self) -> None:
        self.memory = np.full(ITEMS, stranger.SECRET, np.uint8)
        self.buffer = RDMABuffer(self.memory, writable=True)

    @endpoint
    def share(self) -> RDMABuffer:
        """A handle of it."""
        return self.buffer

    @endpoint
    def read(self, buffer: RDMABuffer) -> bool:
        """Whether another's holds what it should."""
        into = np.zeros(ITEMS, np.uint8)
        buffer.read_into(into, timeout=DEADLINE_S).get()
        return bool((into == stranger.SECRET).all())

    @endpoint
    def echo(self, value: bytes) -> bytes:
        """The same."""
        return value


def work(hosts: list[str], *, certs: str | None, secret_file: str | None) -> None:
    """Attach the hosts, say what there is, and go round until the end of the input."""
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    mesh = attach_to_hosts(
        hosts, certs=certs, secret_file=secret_file, insecure=certs is None, data_plane=True, timeout=DEADLINE_S
    )
    seed = 7
    procs = mesh.spawn_procs()
    owners, baits = procs.spawn("owner", Owner, seed), procs.spawn("bait", Bait)
    first, second = owners.slice(hosts=0), owners.slice(hosts=1)
    buffers = second.share.call_one().get(DEADLINE_S)
    bait = baits.slice(hosts=1).share.call_one().get(DEADLINE_S)
    assert baits.slice(hosts=0).read.call_one(bait).get(DEADLINE_S)
    report = {"handles": [buffer.serialize().hex() for buffer in (*buffers, bait)], "victim": stranger.victim(bait)}
    say(report | {"secret": runtime.current().secret.hex()})
    rounds = 0
    while not over.is_set():
        began = time.monotonic()
        failed = []
        if not first.read.call_one(buffers, seed).get(DEADLINE_S):
            failed.append("a read or a write between the hosts was wrong")
        if not all(owners.is_intact.call().get(DEADLINE_S)):
            failed.append("a buffer has been written by somebody else")
        if not baits.slice(hosts=0).read.call_one(bait).get(DEADLINE_S):
            failed.append("the bait has been written by somebody else")
        content = rounds.to_bytes(8, "little") * 4096
        if set(baits.echo.call(content).get(DEADLINE_S)) != {content}:
            failed.append("a call answered something else")
        rounds += 1
        say({"round": rounds, "took_s": time.monotonic() - began, "failed": failed})
    shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="a job on other machines to attack")
    parser.add_argument("hosts", nargs="+", help="tcp://IP:PORT of its agents")
    parser.add_argument("--certs", help="the script's folder of certificates")
    parser.add_argument("--secret-file", help="of the agents, where there are no certificates")
    given = parser.parse_args()
    work(given.hosts, certs=given.certs, secret_file=given.secret_file)
