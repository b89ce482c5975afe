"""The server: it waits for clients, and starts a process for each that serves it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

from skipper.benchmarks.bandwidth.channel import MessageChannel, accept, connect, handle_secret
from skipper.benchmarks.errors import PeerError

__all__ = ["listen", "reach", "serve"]

_CHILD = "skipper.benchmarks.bandwidth.child"
_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
_STDERR = 2


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket.

    Raises:
        OSError: The address is not of this machine, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def serve(
    listener: socket.socket,
    token: bytes,
    *,
    at_once: int,
    net_devices: str | None,
    reachable: str | None,
    log: Callable[[str], None],
) -> None:
    """Serve clients until interrupted. No client can end this loop, whatever it does or sends.

    Args:
        listener: From `listen`.
        token: What clients must prove to hold.
        at_once: How many clients may be served at a time; the next one waits, so that it disturbs nobody.
        net_devices: As for `side.configure`.
        reachable: As ``listen`` of `side.configure`.
        log: Takes a line about each client.
    """
    room = threading.BoundedSemaphore(at_once)

    def serve_one(channel: MessageChannel) -> None:
        try:
            with (
                channel,
                _server_process(
                    channel.fileno(), channel.peer, net_devices, reachable, secret=handle_secret(token)
                ) as child,
            ):
                log(f"{channel.peer} begins")
                channel.close()  # the child holds the connection now; the client must see when the child ends
                status = child.wait()
                log(f"{channel.peer} is done" if status == 0 else f"{channel.peer} ended with status {status}")
        finally:
            room.release()

    while True:
        room.acquire()
        try:
            channel = accept(listener, token, timeout=_TIMEOUT_S)
        except PeerError as error:
            log(str(error))
            room.release()
            continue
        # A daemon: when this process ends, the kernel ends the children, which are tied to it.
        threading.Thread(target=serve_one, args=(channel,), daemon=True).start()


def reach(
    server: tuple[str, int] | None, token: bytes, *, net_devices: str | None, timeout: float
) -> contextlib.AbstractContextManager[MessageChannel]:
    """A channel to the server at a host and port, or to one that is started here for this process alone.

    Args:
        server: Where it listens; ``None`` starts one, which ends with the block.
        token: The secret that both ends prove to each other, and that handles are proved by.
        net_devices: As for `serve`, for the server that is started here.
        timeout: Default deadline of the channel, in seconds.

    Raises:
        PeerError: The server cannot be reached, or holds another token.
    """
    if server is None:
        return _local_server(token, net_devices=net_devices, timeout=timeout)
    return connect(*server, token, timeout=timeout)


@contextlib.contextmanager
def _local_server(token: bytes, *, net_devices: str | None, timeout: float) -> Iterator[MessageChannel]:
    """Start a server behind a socket pair, which has no port, and which no other process can reach."""
    ours, theirs = socket.socketpair()
    with ours, theirs, _server_process(theirs.fileno(), "", net_devices, None, secret=handle_secret(token)) as child:
        theirs.close()
        with MessageChannel(ours, peer=f"the server process {child.pid}", timeout=timeout) as channel:
            yield channel


@contextlib.contextmanager
def _server_process(
    fileno: int, client: str, net_devices: str | None, reachable: str | None, *, secret: bytes
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process that owns the memory, and give it the socket; it ends with the block.

    It also ends with this process, however this one ends: the socket closes, and the kernel kills it.
    """
    # A new program, not a fork, which UCX does not survive. What it prints goes to standard error, since standard
    # output may be for JSON alone.
    about = [str(fileno), str(os.getpid()), client, net_devices or "", reachable or ""]
    command = [sys.executable, "-m", _CHILD, *about]
    child = subprocess.Popen(command, pass_fds=[fileno], stdin=subprocess.PIPE, stdout=_STDERR)
    try:
        if child.stdin is not None:
            with contextlib.suppress(BrokenPipeError), child.stdin:  # the child reads this first, unless it has failed
                child.stdin.write(secret)
        yield child
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_STOP_TIMEOUT_S)
    finally:
        child.kill()  # no effect on one that has ended
        child.wait()
