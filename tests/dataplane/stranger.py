"""Another user of the host, who knows all that a handle says but has no token: ``stranger.py SECONDS DEVICES`` (root).

On its standard input is, as JSON, what `victim` returns. It tries to read the owner's memory by UCX itself, over ever
new connections, and prints how much it has read.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

NOBODY = 65534
SECRET = 0x5A
TRYING_S = 6.0
PATIENCE_S = 60.0


def victim(buffer: Any) -> dict[str, Any]:
    """What there is to know of a remote buffer."""
    peer, remote, _ = buffer.route()
    return {
        "worker": peer.connections.worker_address.hex(),
        "keys": [key.hex() for key in remote.key.packed],
        "address": remote.address,
        "word": remote.key.far_word,
        "epoch": remote.handle.epoch,
    }


def command(devices: str = "lo") -> list[str]:
    """What starts one that may use some network devices."""
    return [sys.executable, "-m", "tests.dataplane.stranger", str(TRYING_S), devices]


def has_read(process: "subprocess.Popen[str]") -> int:
    """How many bytes it has read in the end."""
    assert process.stdout is not None
    read = int(process.stdout.readline())
    assert process.wait(PATIENCE_S) == 0
    return read


def begin(process: "subprocess.Popen[str]", buffer: Any) -> None:
    """Tell it whom to attack; returns once it tries."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(victim(buffer)))
    process.stdin.close()
    assert process.stdout.readline() == "trying\n"


def main() -> None:
    from skipper.dataplane.backends.ucx.engine import find_library, load, options
    from skipper.dataplane.config import Config

    target = json.load(sys.stdin)
    ucp = load(find_library(None))
    chosen = options(Config(ucx={"NET_DEVICES": sys.argv[2], "TLS": "tcp,self"}), ucp.library_version())
    ucp.set_global_option("LOG_LEVEL", "fatal")
    context = ucp.UcpContext(chosen)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    into = np.zeros(64, np.uint8)
    print("trying", flush=True)
    end = time.monotonic() + float(sys.argv[1])
    read = 0
    while time.monotonic() < end:
        worker = ucp.UcpWorker(context)
        kept = []
        for number in range(8):
            with contextlib.suppress(ucp.UcxError):
                endpoint = ucp.UcpEndpoint(worker, bytes.fromhex(target["worker"]), 1 + number)
                keys = tuple(ucp.RemoteKey(endpoint, bytes.fromhex(key)) for key in target["keys"])
                where = into.ctypes.data, target["address"], into.nbytes
                for by_message in (False, True):
                    word = target["word"]
                    batch = ucp.Batch.single(endpoint, keys, False, 0, *where, word, target["epoch"], False, by_message)
                    batch.advance(0.02, time.monotonic() + 0.02)
                    kept.append((endpoint, batch))
        worker.drive([batch for _, batch in kept], time.monotonic() + 0.5)
        read += int(np.count_nonzero(into == SECRET))
        for endpoint, _ in kept:
            endpoint.close()
    print(read, flush=True)
    os._exit(0)  # without taking apart what may still be connecting


if __name__ == "__main__":
    main()
