"""Rates over one device in the guest: bare, by the verbs backend, by UCX: `python -m tests.rdma_guest.ucx_rate`.

As `rate`, with a column for the system's UCX. All between two processes over the same device, in turns.
"""

import argparse
import statistics

import numpy as np

from skipper import dataplane
from skipper.dataplane import RDMABuffer
from tests.conformance.owner import RemoteOwner
from tests.rdma_guest import bare_verbs as bare
from tests.rdma_guest.rate import MIB, rates
from tests.rdma_guest.ucx_system import settings

DEVICE = "rxe0"


def main() -> None:
    parser = argparse.ArgumentParser(description="rate over verbs and over UCX, beside the bare device's")
    parser.add_argument("--sizes", nargs="+", type=int, default=[4096, MIB, 8 * MIB])
    parser.add_argument("--turns", type=int, default=40)
    options = parser.parse_args()

    largest = max(options.sizes)
    verbs = {"backend": "verbs", "verbs": {"device": DEVICE}}
    # A handle of each owner bears one backend only, so that this process uses that one.
    dataplane.configure(**{**verbs, **settings(DEVICE), "backend": "auto"})
    owners = [RemoteOwner(chosen, shared=False) for chosen in (verbs, settings(DEVICE))]
    buffers = [RDMABuffer.deserialize(owner("make_filled", largest, 7)[1]) for owner in owners]
    assert [buffer.backend for buffer in buffers] == ["verbs", "ucx"]
    memory = np.zeros(largest, np.uint8)
    print(f"{'op':6}{'bytes':>10}{'bare MB/s':>12}{'verbs MB/s':>12}{'ucx MB/s':>12}")
    with bare.connected(DEVICE, DEVICE, largest) as (end, _):
        for nbytes in options.sizes:
            part = memory[:nbytes]
            for name, opcode in (("read_into", bare.READ), ("write_from", bare.WRITE)):
                transfers = [getattr(buffer.at(0, nbytes), name) for buffer in buffers]
                ours = [lambda transfer=transfer, part=part: transfer(part).get() for transfer in transfers]
                turns = rates([end.repeat(opcode, nbytes), *ours], nbytes, options.turns)
                medians = [statistics.median(column) / 1e6 for column in zip(*turns, strict=True)]
                print(f"{name.split('_')[0]:6}{nbytes:10}" + "".join(f"{rate:12.1f}" for rate in medians), flush=True)
    for owner in owners:
        owner.close()


if __name__ == "__main__":
    main()
