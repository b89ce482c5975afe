"""A worker with the port of an earlier one is taken for that by an owner that knew it. Then another one tries."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

from tests.conformance.owner import RemoteOwner
from tests.dataplane import stranger
from tests.dataplane.backends.ucx.test_strangers import NBYTES, owner
from tests.reach import TCP_TOO

__all__ = ["owner"]

READER = f"""
import socket, sys
import numpy as np
from skipper import dataplane
first, last, *late = map(int, sys.argv[1:])
taken = [socket.create_server(("127.0.0.1", port)) for port in late]
dataplane.configure(ucx={TCP_TOO!r} | {{"TLS": "tcp,self", "TCP_PORT_RANGE": f"{{first}}-{{last}}"}})
buffer = dataplane.RDMABuffer.deserialize(bytes.fromhex(sys.stdin.read()))
peer, _, _ = buffer.route()  # UCX has begun, with two workers
for each in taken:
    each.close()
into = np.zeros({NBYTES}, np.uint8)
buffer.read_into(into, timeout=30).get()
assert (into == {stranger.SECRET}).all()
print(*(place.port for each in peer.connections._connections[:1] for place in each._client.sources))
"""


class Ports:
    """Some ports in a row, all of them taken."""

    def __init__(self, count: int) -> None:
        self._sockets: dict[int, socket.socket] = {}
        while len(self._sockets) < count:
            self.close()
            self._take(0)
            with contextlib.suppress(OSError):
                for number in range(1, count):
                    self._take(self.first + number)

    @property
    def first(self) -> int:
        return min(self._sockets)

    @contextlib.contextmanager
    def free(self, *ports: int) -> Iterator[None]:
        for port in ports:
            self._sockets[port].close()
        yield
        for port in ports:
            self._take(port)

    def close(self) -> None:
        for each in self._sockets.values():
            each.close()
        self._sockets.clear()

    def _take(self, port: int) -> None:
        made = socket.socket()
        try:
            made.bind(("127.0.0.1", port))
        except OSError:
            made.close()
            raise
        self._sockets[made.getsockname()[1]] = made


def port_of_reader(raw: bytes, first: int, last: int, *late: int) -> int:
    """Read in a process that may use these ports as far as they are free, and some of them late; by which it has."""
    command = [sys.executable, "-c", READER, *map(str, (first, last, *late))]
    reader = subprocess.run(command, input=raw.hex(), capture_output=True, text=True, timeout=60, check=False)
    assert reader.returncode == 0, reader.stderr
    return int(reader.stdout)


def test_the_port_of_an_earlier_worker_costs_no_read(owner: RemoteOwner) -> None:
    """Each process has two workers. Only that which connects is known to the owner."""
    _, raw = owner("make_filled", NBYTES, stranger.SECRET)
    with contextlib.closing(Ports(5)) as ports:
        first, last = ports.first, ports.first + 4
        known = []
        for pair in ((first, first + 1), (first + 2, first + 3)):
            with ports.free(*pair):
                known.append(port_of_reader(raw, first, last))
        with ports.free(*known, last):
            assert port_of_reader(raw, first, last, last) == last
