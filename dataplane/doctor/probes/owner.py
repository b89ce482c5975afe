"""The owner of a trial: ``python -m skipper.dataplane.doctor.probes.owner BACKEND NBYTES [LIBUCP]``.

Unlike its neighbours it is run as a module: it is the data plane itself that is tried. Prints the handle of a buffer
that is full of 0x5A, in hexadecimal, and keeps it until standard input ends.
"""

import sys

import numpy as np

from skipper import dataplane


def main() -> None:
    """Own the buffer."""
    backend, nbytes = sys.argv[1], int(sys.argv[2])
    dataplane.configure(backend=backend, ucx_library=sys.argv[3] if len(sys.argv) > 3 else None)
    data = dataplane.empty_array(nbytes, np.uint8) if backend == "shm" else np.empty(nbytes, np.uint8)
    data[:] = 0x5A
    buffer = dataplane.RDMABuffer(data)
    sys.stdout.write(buffer.serialize().hex() + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
