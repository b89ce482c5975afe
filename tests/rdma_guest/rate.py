"""The data plane's rate over verbs beside that of the bare device, in the guest: `python -m tests.rdma_guest.rate`.

Bare: a loop over memory registered beforehand, pyverbs only, with requests made beforehand: one per MiB, chained, the
last one signalled, posted by one call and polled for, asleep on the completion channel where that finds nothing. Ours:
`read_into(...).get()` and `write_from(...).get()`, with the epoch words that make a dropped buffer an error. Both with
one transfer in flight, between two processes over the same device and memory of the same kind. They take turns of some
16 MiB, and who begins alternates, so that what else the machine does meets both alike. Rates are medians; the ratio is
the median of the turns' ratios, with their quartiles.
"""

import argparse
import json
import statistics
import time

import numpy as np

from skipper import dataplane
from skipper.dataplane import RDMABuffer
from tests.conformance.owner import RemoteOwner
from tests.rdma_guest import bare_verbs as bare

MIB = 1 << 20
TURN_NBYTES = 16 * MIB
TURN_CALLS = 200  # at most


def rates(calls, nbytes, turns):
    """Bytes per second of each call, one row per turn, in which all have their block of calls, one after the other."""
    count = max(1, min(TURN_CALLS, TURN_NBYTES // nbytes))
    rows = []
    for turn in range(turns):
        row = [0.0] * len(calls)
        for at in range(len(calls)):
            which = (turn + at) % len(calls)
            call = calls[which]
            call()  # not timed: the others have just been in the caches
            begin = time.monotonic()
            for _ in range(count):
                call()
            row[which] = count * nbytes / (time.monotonic() - begin)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="rate over verbs, beside the bare device's")
    parser.add_argument("--devices", nargs=2, default=["rxe0", "rxe0"], help="of the initiator and of the owner")
    parser.add_argument("--sizes", nargs="+", type=int, default=[4096, 65536, MIB, 8 * MIB, 64 * MIB])
    parser.add_argument("--turns", type=int, default=40)
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
                calls = [end.repeat(opcode, nbytes), lambda transfer=transfer, part=part: transfer(part).get()]
                found = rates(calls, nbytes, options.turns)
                theirs, mine = (statistics.median(column) for column in zip(*found, strict=True))
                low, ratio, high = statistics.quantiles([ours / bare for bare, ours in found])
                row = {"op": name, "nbytes": nbytes, "bare": theirs, "ours": mine}
                rows.append({**row, "ratio": ratio, "low": low, "high": high})
    owner.close()
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'op':6}{'bytes':>10}{'bare MB/s':>12}{'ours MB/s':>12}{'ratio':>8}{'quartiles':>14}")
    for row in rows:
        speeds = f"{row['bare'] / 1e6:12.1f}{row['ours'] / 1e6:12.1f}"
        print(f"{row['op']:6}{row['nbytes']:10}{speeds}{row['ratio']:8.3f}{row['low']:8.3f}{row['high']:6.3f}")


if __name__ == "__main__":
    main()
