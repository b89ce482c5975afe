"""The process that owns the memory, started with ``FD PARENT CLIENT NET_DEVICES LISTEN``.

Each client gets a process of its own. So each client measures what first use really costs, and no client leaves
memory, settings or a crash behind for the next one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

from skipper.benchmarks.bandwidth import ceiling
from skipper.benchmarks.bandwidth.channel import CONNECT_TIMEOUT_S, MessageChannel
from skipper.benchmarks.bandwidth.messages import (
    Alive,
    Connect,
    Corrupt,
    Done,
    Elapsed,
    Fill,
    Goodbye,
    IntegrityVerdict,
    Offer,
    Request,
    TransferOrder,
    Verify,
    Which,
    Workload,
    answer,
    read_request,
    refuse,
)
from skipper.benchmarks.bandwidth.side import Side, configure, footprint, patience, require_feasible
from skipper.benchmarks.errors import PeerError
from skipper.benchmarks.parent import follow_parent
from skipper.dataplane.errors import DataplaneError

_TIMEOUT_S = 60.0

# Bad input, a failed transfer, no memory: the client gets the error.
_CLIENTS_TO_KNOW = (DataplaneError, ValueError, TypeError, OSError, RuntimeError, MemoryError)


def main(arguments: list[str]) -> int:
    """Serve one client over the inherited socket; ends with the client, or with the parent.

    The secret of the handles comes by standard input. Without a name of the client, the client is the parent itself,
    and failures are not printed.
    """
    fileno, parent, client = int(arguments[0]), int(arguments[1]), arguments[2]
    net_devices, listen = (argument or None for argument in arguments[3:])
    # Ctrl-C reaches the whole process group; the parent alone answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not follow_parent(parent, signal.SIGKILL):
        return 1
    secret = sys.stdin.buffer.read()
    with MessageChannel(socket.socket(fileno=fileno), peer=client or "the client", timeout=_TIMEOUT_S) as channel:
        try:
            serve_client(channel, net_devices=net_devices, listen=listen, secret=secret)
        except PeerError as error:
            if client:
                print(error, file=sys.stderr, flush=True)
            return 1
    return 0


def serve_client(channel: MessageChannel, *, net_devices: str | None, listen: str | None, secret: bytes) -> None:
    """Do what one client asks for, until it says goodbye.

    Args:
        channel: To the client.
        net_devices: As for `side.configure`.
        listen: As for `side.configure`.
        secret: As for `side.configure`.

    Raises:
        PeerError: The client is lost, silent for longer than its own work can take, or sends something invalid.
            Its memory has been given back.
    """
    workload = read_request(channel, timeout=CONNECT_TIMEOUT_S)
    if not isinstance(workload, Workload):
        raise PeerError(f"{channel.peer} begins with {type(workload).__name__}")
    try:
        require_feasible(workload, footprint(workload, client=False))
        configure(workload, net_devices, listen=listen, secret=secret)
        side = _open(channel, workload)
    except PeerError:
        raise
    except _CLIENTS_TO_KNOW as error:
        refuse(channel, error)
        return
    with contextlib.closing(side):
        while not isinstance(request := read_request(channel, timeout=patience(workload)), Goodbye):
            try:
                _handle(channel, side, request, net_devices)
            except PeerError:
                raise
            except _CLIENTS_TO_KNOW as error:
                refuse(channel, error)
    answer(channel, Done())


def _open(channel: MessageChannel, workload: Workload) -> Side:
    side = Side(workload, exposes=True, transfers=workload.bidirectional)
    try:
        descriptors, register_us = side.expose()
        started = ceiling.started(os.getpid())
        answer(
            channel,
            Offer(
                register_us=register_us,
                boot_id=ceiling.boot_id(),
                pid=os.getpid(),
                started=-1 if started is None else started,
                addresses=side.addresses,
            ),
        )
        for descriptor in descriptors:
            channel.send(descriptor)
    except BaseException:
        side.close()
        raise
    return side


def _handle(channel: MessageChannel, side: Side, request: Request, net_devices: str | None) -> None:
    match request:
        case Connect(handles):
            side.connect([channel.receive() for _ in range(handles)])
            answer(channel, Done())
        case Fill(where, size, seed):
            side.fill(where, size, seed=seed)
            answer(channel, Done())
        case Verify(where, size, seed):
            answer(channel, IntegrityVerdict(side.verify(where, size, seed=seed)))
        case Corrupt(where, size, at):
            side.corrupt(where, size, at=at)
            answer(channel, Done())
        case TransferOrder(size, runs):
            answer(channel, Elapsed(side.transfer(size, runs=runs)))
        case Which(backend):
            answer(channel, ceiling.link(backend, net_devices))
        case Alive():
            pass
        case _:
            raise PeerError(f"{channel.peer} asks for {type(request).__name__} in the middle of a session")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
