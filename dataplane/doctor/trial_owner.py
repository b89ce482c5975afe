"""The owner of a trial: ``python -m skipper.dataplane.doctor.trial_owner BACKEND NBYTES [LIBUCP]``.

Prints the handle of a buffer that is full of 0x5A, in hexadecimal, and keeps the buffer until standard input ends.
"""

import sys

import numpy as np

from skipper import dataplane


def main() -> None:
    """Make the buffer, print its handle, wait."""
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
