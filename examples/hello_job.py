"""The first minute on several hosts: an engine places them, and each says where it is.

    python -m examples.hello_job                         # two hosts that are processes of this machine
    python -m examples.hello_job --job slurm:2           # two places of a Slurm cluster

Each host gets a process with a worker in it. The last one owns four numbers, and the first reads them from its memory,
over whatever way there is between the two.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# So that `python examples/hello_job.py` works as well as `python -m examples.hello_job`.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from examples import job_option
from skipper.control import Actor, HostMesh, context, endpoint
from skipper.control.cluster.jobs import LocalJob
from skipper.dataplane import RDMABuffer, empty_array


class Worker(Actor):
    """One on each host; it owns four numbers that the others may read."""

    def __init__(self) -> None:
        weights = empty_array((4,), "float32")
        weights[:] = context().actor_instance.rank.rank
        self.buffer = RDMABuffer(weights)

    @endpoint
    def where(self) -> str:
        """The rank, and the process."""
        return f"rank {context().actor_instance.rank.rank} in process {os.getpid()}"

    @endpoint
    def share(self) -> RDMABuffer:
        """Pass on a handle; the numbers themselves stay where they are."""
        return self.buffer

    @endpoint
    def fetch(self, buffer: RDMABuffer) -> list[float]:
        """Read the memory behind a handle; its owner's Python takes no part."""
        mine = np.empty(4, dtype="float32")
        buffer.read_into(mine).get()
        return mine.tolist()


def greet(hosts: HostMesh) -> None:
    """Spawn a worker on each host, and have one read what another has."""
    last = hosts.size - 1
    workers = hosts.spawn_procs({"gpus": 1}).spawn("workers", Worker)
    for host, where in zip(hosts.names, workers.where.call().get(timeout=60), strict=True):
        print(f"{host}: {where}")
    buffer = workers.slice(hosts=last, gpus=0).share.call_one().get(timeout=60)
    numbers = workers.slice(hosts=0, gpus=0).fetch.call_one(buffer).get(timeout=60)
    print(f"rank 0 reads from rank {last}: {numbers}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example."""
    summary, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="python -m examples.hello_job", description=summary)
    job_option.add_arguments(parser)
    options = parser.parse_args(argv)
    if options.hosts is None and options.job is None:
        options.job = LocalJob(2)
    with job_option.hosts_of(options) as hosts:
        greet(hosts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
