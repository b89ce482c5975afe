"""The floor of everything that sends messages: processes that block on a socket."""

from __future__ import annotations

import multiprocessing
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import numpy as np

from skipper.benchmarks.peers.memory import Bytes, MemoryOwner, Operation, keep, memory_blocks
from skipper.benchmarks.peers.protocol import Block, MeasuringTurn
from skipper.benchmarks.peers.work import FANOUT, MESSAGE_NBYTES, PIPELINED, REGION_NBYTES, Family, Span

__all__ = ["CANNOT", "open_blocks"]

CANNOT: dict[str, str] = {}

_HEADER = struct.Struct("<cQQ")  # read or write, offset, length
_MESSAGE = bytes(MESSAGE_NBYTES)
_SPAWNED = """import socket, sys
connection = socket.socket(fileno=int(sys.argv[1]))
connection.sendall(connection.recv(100))
connection.recv(1)
"""


def open_blocks(family: Family, stack: ExitStack) -> dict[str, Block]:
    """See `benchmarks.peers.child`."""
    if family == "memory":
        return memory_blocks(_Region(stack))
    echoes = [_echo_process(stack) for _ in range(FANOUT)]

    def pipeline() -> None:
        # Sent by a thread of its own: both sockets' buffers hold less than all of them.
        sender = Thread(target=echoes[0].sendall, args=(_MESSAGE * PIPELINED,))
        sender.start()
        _receive(echoes[0], memoryview(bytearray(MESSAGE_NBYTES * PIPELINED)))
        sender.join()

    return {
        "call": lambda turn: turn.times(lambda: _ask(echoes[:1])),
        "actor_to_actor": lambda turn: turn.times(lambda: _ask(echoes[:1])),  # any caller is just a process
        "fanout": lambda turn: turn.times(lambda: _ask(echoes)),
        "pipelined": lambda turn: turn.times(pipeline),
        "spawn": _time_spawns,
    }


def _ask(echoes: Sequence[socket.socket]) -> None:
    for echo in echoes:
        echo.sendall(_MESSAGE)
    for echo in echoes:
        _receive(echo, memoryview(bytearray(MESSAGE_NBYTES)))


def _echo_process(stack: ExitStack) -> socket.socket:
    here, there = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(target=_echo, args=(there,), daemon=True)
    process.start()
    there.close()
    stack.callback(process.join)
    return stack.enter_context(here)


def _echo(connection: socket.socket) -> None:
    while message := connection.recv(1 << 20):
        connection.sendall(message)


def _time_spawns(turn: MeasuringTurn) -> list[int]:
    """Bare interpreters, which import next to nothing."""
    spawned: list[tuple[subprocess.Popen[bytes], socket.socket]] = []

    def spawn() -> None:
        for _ in range(FANOUT):
            here, there = socket.socketpair()
            with there:
                command = [sys.executable, "-c", _SPAWNED, str(there.fileno())]
                spawned.append((subprocess.Popen(command, pass_fds=[there.fileno()]), here))
        _ask([connection for _, connection in spawned[-FANOUT:]])

    durations = turn.times(spawn, warmup=0)
    for process, connection in spawned:
        connection.close()
        process.wait()
    return durations


class _Region:
    """Bytes of another process, asked for over TCP."""

    def __init__(self, stack: ExitStack) -> None:
        self.local: Bytes = np.empty(REGION_NBYTES, np.uint8)
        self._owner = MemoryOwner.start(stack, _own)
        self._socket = stack.enter_context(socket.create_connection(self._owner.hello))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.fill, self.holds = self._owner.fill, self._owner.holds

    def operation(self, spans: Sequence[Span], *, write: bool) -> Operation:
        """All requests first, then all answers; they fit into the socket's buffer."""
        requests = [_HEADER.pack(b"w" if write else b"r", *span) for span in spans]
        views = [self.local[offset : offset + nbytes].data for offset, nbytes in spans]

        def read() -> None:
            self._socket.sendall(b"".join(requests))
            for view in views:
                _receive(self._socket, view)

        def send() -> None:
            for request, view in zip(requests, views, strict=True):
                self._socket.sendall(request)
                self._socket.sendall(view)
            _receive(self._socket, memoryview(bytearray(len(views))))

        return send if write else read


def _own(connection: Connection[Any, Any]) -> None:
    memory: Bytes = np.empty(REGION_NBYTES, np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection.send(listener.getsockname())
        client, _ = listener.accept()
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    Thread(target=_serve, args=(client, memory), daemon=True).start()
    keep(connection, memory)


def _serve(client: socket.socket, memory: Bytes) -> None:
    header = bytearray(_HEADER.size)
    while _receive(client, memoryview(header)):
        what, offset, nbytes = _HEADER.unpack(header)
        view = memory[offset : offset + nbytes].data
        if what == b"r":
            client.sendall(view)
        else:
            _receive(client, view)
            client.sendall(b"w")


def _receive(connection: socket.socket, into: memoryview) -> bool:
    """Fill ``into``; False when the other end has closed."""
    done = 0
    while done < len(into):
        count = connection.recv_into(into[done:])
        if count == 0:
            return False
        done += count
    return True
