"""Strangers at the sockets of an owner: what they send changes no byte, and the owner goes on."""

import contextlib
import os
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from tests.conformance.conftest import Case
from tests.conformance.owner import RemoteOwner
from tests.conformance.records import Fault, Provoke
from tests.conformance.test_transfers import handle_to, pattern
from tests.sameness import assert_same

LISTEN = "0A"


def listening(pid: int) -> list[tuple[str, int]]:
    """TCP addresses of a process: proc(5), /proc/net/tcp."""
    inodes = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{entry}"))
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == LISTEN and f"socket:[{fields[9]}]" in inodes:
            address, port = fields[1].split(":")
            found.append((socket.inet_ntoa(struct.pack("=I", int(address, 16))), int(port, 16)))
    return found


def garbage() -> list[bytes]:
    chosen = random.Random(5)
    return [
        b"",
        b"\x00",
        b"GET / HTTP/1.0\r\n\r\n",
        *(chosen.randbytes(nbytes) for nbytes in (7, 64, 4096, 100_000)),
        bytes(4096),
        b"\xff" * 4096,
    ]


def test_strangers_change_no_byte_and_the_owner_goes_on(
    waiting_case: Case, start: Callable[[], RemoteOwner], provoke: Provoke
) -> None:
    owner = start()
    content = pattern(100_000)
    name, buffer = handle_to(owner, content)
    into = bytearray(len(content))
    buffer.read_into(into).get()
    addresses = listening(owner.process.pid)
    if "tcp" not in waiting_case.settings["ucx"]["TLS"]:
        assert not addresses
        return
    assert {host for host, _ in addresses} == {"127.0.0.1"}
    for address in addresses:
        for sent in garbage():
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=5) as stranger:
                stranger.sendall(sent)
                stranger.shutdown(socket.SHUT_WR)
    with provoke(Fault.GARBAGE, waiting_case.id):
        buffer.read_into(into, timeout=20).get()
    assert_same(into, content)
    assert_same(owner("content", name), content)
    assert owner.process.poll() is None
