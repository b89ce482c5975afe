"""The server: waits for clients, one after another, and starts for each the process that serves it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

from skipper.benchmarks.bandwidth.channel import MessageChannel, accept, handle_secret
from skipper.benchmarks.errors import PeerError

__all__ = ["listen", "local_server", "serve"]

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
    """Serve clients until interrupted. No client can end it, whatever it does or sends.

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
                channel.close()  # the child holds the connection now, and its end must be seen by the client
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


@contextlib.contextmanager
def local_server(token: bytes, *, net_devices: str | None, timeout: float) -> Iterator[MessageChannel]:
    """Start a server for this process alone, and see to its end.

    There is no port to find, and nobody else can hold the other end.

    Args:
        token: What handles are proved by.
        net_devices: As for `serve`.
        timeout: Default deadline of the channel, in seconds.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs, _server_process(theirs.fileno(), "", net_devices, None, secret=handle_secret(token)) as child:
        theirs.close()
        with MessageChannel(ours, peer=f"the server process {child.pid}", timeout=timeout) as channel:
            yield channel


@contextlib.contextmanager
def _server_process(
    fileno: int, client: str, net_devices: str | None, reachable: str | None, *, secret: bytes
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process that owns the memory, give it the socket, and see to its end.

    It ends with this process too, however this process ends: the socket closes, and the kernel kills it.
    """
    # A program of its own, not a fork: UCX does not survive one. Its words go to standard error, since
    # standard output may be for JSON alone.
    about = [str(fileno), str(os.getpid()), client, net_devices or "", reachable or ""]
    command = [sys.executable, "-m", _CHILD, *about]
    child = subprocess.Popen(command, pass_fds=[fileno], stdin=subprocess.PIPE, stdout=_STDERR)
    try:
        if child.stdin is not None:
            with contextlib.suppress(BrokenPipeError), child.stdin:  # it reads that first of all, unless it fails
                child.stdin.write(secret)
        yield child
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_STOP_TIMEOUT_S)
    finally:
        child.kill()  # no effect on one that has ended
        child.wait()
