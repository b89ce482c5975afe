"""A process that owns memory and does nothing else: it prints a handle and waits for its stdin to close."""

import sys

import torch

from skipper import dataplane


def main() -> None:
    memory = dataplane.empty((int(sys.argv[1]),), torch.uint8)
    memory.zero_()
    buffer = dataplane.RDMABuffer(memory)
    print(buffer.serialize().hex(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
