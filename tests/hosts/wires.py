"""Wires between machines that delay and lose packets, for kernels without netem.

A wire is two TAP devices, one in the namespace of a machine and one on the bridge. A program, this module, carries each
frame from one to the other, later by the delay of the rules, or not at all. Frames of one direction keep their order.
It reads new rules from standard input, a line of JSON each, and ends with it.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO

_TUNSETIFF = 0x400454CA  # linux/if_tun.h
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000  # linux/sched.h
_NAMESPACES = "/run/netns"  # of ip-netns(8)
_MOST_NBYTES = 1 << 16
_BURST = 64
"""Frames that are read from one device before the others have their turn."""
_END_S = 10.0
_PRIORITY = -15
"""A busy machine is not to be a bad wire."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """How wires carry frames, in each direction.

    Attributes:
        delay_s: How long each frame takes.
        jitter_s: How much longer or shorter, evenly distributed.
        loss: The share of frames that get lost.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0


class Wires:
    """The program that carries frames."""

    def __init__(self, process: "subprocess.Popen[str]", rules: IO[str]) -> None:
        self._process = process
        self._rules = rules

    @contextlib.contextmanager
    def shaped(self, rules: Rules) -> Iterator[None]:
        """Have all wires carry frames by these rules meanwhile."""
        self._send(rules)
        try:
            yield
        finally:
            self._send(Rules())

    def _send(self, rules: Rules) -> None:
        assert self._process.poll() is None, "the program that carries frames has ended"
        print(json.dumps(dataclasses.asdict(rules)), file=self._rules, flush=True)


@contextlib.contextmanager
def wires(ends: Sequence[tuple[str, str, str]]) -> Iterator[Wires]:
    """Carry frames between pairs of TAP devices that exist.

    Args:
        ends: For each wire a namespace, the device in it, and the device in the namespace of the caller.
    """
    command = [sys.executable, "-m", "tests.hosts.wires", json.dumps(ends)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            assert process.stdout.readline() == "carrying\n"
            yield Wires(process, process.stdin)
        finally:
            process.stdin.close()
            try:
                process.wait(_END_S)
            finally:
                process.kill()


class _Carrier:
    """Reads frames, and writes each when it is due."""

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._other = dict(pairs) | {there: here for here, there in pairs}
        self._last_s = dict.fromkeys(self._other, 0.0)
        """By device, when the last frame to it is due."""
        self._due: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()
        self._random = random.Random(0)
        self._rules = Rules()
        self._poll = select.epoll()
        for device in (*self._other, sys.stdin.fileno()):
            self._poll.register(device, select.EPOLLIN)

    def run(self) -> None:
        """Carry, until standard input ends."""
        while True:
            wait_s = self._due[0][0] - time.monotonic() if self._due else -1.0
            for device, _ in self._poll.poll(max(wait_s, 0.0) if self._due else None):
                if device != sys.stdin.fileno():
                    self._read(device)
                elif line := sys.stdin.readline():
                    self._rules = Rules(**json.loads(line))
                else:
                    return
            self._write()

    def _read(self, device: int) -> None:
        to, rules = self._other[device], self._rules
        with contextlib.suppress(BlockingIOError):
            for _ in range(_BURST):
                frame = os.read(device, _MOST_NBYTES)
                if self._random.random() < rules.loss:
                    continue
                jitter_s = rules.jitter_s and self._random.uniform(-rules.jitter_s, rules.jitter_s)
                at_s = max(time.monotonic() + rules.delay_s + jitter_s, self._last_s[to])
                self._last_s[to] = at_s
                heapq.heappush(self._due, (at_s, next(self._numbers), to, frame))

    def _write(self) -> None:
        now_s = time.monotonic()
        while self._due and self._due[0][0] <= now_s:
            _, _, device, frame = heapq.heappop(self._due)
            with contextlib.suppress(OSError):  # it has been pulled, or is full: the frame is lost
                os.write(device, frame)


def _open(device: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _main(ends: Sequence[tuple[str, str, str]]) -> None:
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    pairs = []
    for namespace, inside, outside in ends:
        there = os.open(f"{_NAMESPACES}/{namespace}", os.O_RDONLY)
        _enter(there)
        os.close(there)
        here = _open(inside)
        _enter(home)
        pairs.append((here, _open(outside)))
    os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    print("carrying", flush=True)
    _Carrier(pairs).run()


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
