"""The data plane's rate over verbs beside that of the bare device, in the guest: `python -m tests.rdma_guest.rate`.

Bare: a loop over memory registered beforehand, pyverbs only. Ours: `read_into(...).get()` and `write_from(...).get()`,
with the epoch words that make a dropped buffer an error. Both between two processes over the same device, in turns, so
that what else the machine does meets both alike. Rates are medians; the ratio is the median of the turns' ratios.
"""

import argparse
import json
import statistics
import time

import numpy as np

import dataplane
from dataplane import RDMABuffer
from tests.conformance.owner import RemoteOwner
from tests.rdma_guest import bare_verbs as bare

MIB = 1 << 20


def ours(transfer, memory, *, seconds):
    """Bytes per second of transfers one after the other, the first one not counted."""
    transfer(memory).get()
    count, begin = 0, time.monotonic()
    while time.monotonic() - begin < seconds:
        transfer(memory).get()
        count += 1
    return count * memory.nbytes / (time.monotonic() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description="rate over verbs, beside the bare device's")
    parser.add_argument("--devices", nargs=2, default=["rxe0", "rxe0"], help="of the initiator and of the owner")
    parser.add_argument("--sizes", nargs="+", type=int, default=[4096, 65536, MIB, 8 * MIB, 64 * MIB])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each turn")
    parser.add_argument("--json", action="store_true", help="one JSON line in place of the table")
    options = parser.parse_args()

    here, there = options.devices
    dataplane.configure(backend="verbs", verbs={"device": here})
    owner = RemoteOwner({"backend": "verbs", "verbs": {"device": there}}, shared=False)
    largest = max(options.sizes)
    _, handle = owner("make_filled", largest, 7)
    whole = RDMABuffer.deserialize(handle)
    memory = np.zeros(largest, np.uint8)
    rows = []
    with bare.connected(here, there, largest) as (end, _):
        for nbytes in options.sizes:
            buffer, part = whole.at(0, nbytes), memory[:nbytes]
            for name, opcode, transfer in (
                ("read", bare.READ, buffer.read_into),
                ("write", bare.WRITE, buffer.write_from),
            ):
                rates = [
                    (
                        bare.rate(end, opcode, nbytes, seconds=options.seconds),
                        ours(transfer, part, seconds=options.seconds),
                    )
                    for _ in range(options.turns)
                ]
                medians = [statistics.median(column) for column in zip(*rates, strict=True)]
                ratio = statistics.median(mine / theirs for theirs, mine in rates)
                rows.append({"op": name, "nbytes": nbytes, "bare": medians[0], "ours": medians[1], "ratio": ratio})
    owner.close()
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'op':6}{'bytes':>10}{'bare MB/s':>12}{'ours MB/s':>12}{'ratio':>8}")
    for row in rows:
        print(f"{row['op']:6}{row['nbytes']:10}{row['bare'] / 1e6:12.1f}{row['ours'] / 1e6:12.1f}{row['ratio']:8.2f}")


if __name__ == "__main__":
    main()
