"""Listening sockets that another program has opened, such as systemd: an agent serves the connections that come in.

gRPC listens on its own sockets only. So a thread forwards the bytes of each connection, in both directions and
unchanged (TLS included), to a socket of this host at which the agent listens.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading

_FIRST_FD = 3
"""The first descriptor that a service manager passes on: SD_LISTEN_FDS_START of sd_listen_fds(3)."""

_CHUNK_NBYTES = 1 << 16


def adopt(fd: int) -> socket.socket:
    """A listening socket that this process has inherited; programs that it starts do not inherit it.

    Raises:
        ValueError: there is no such descriptor, or it is no TCP socket that listens.
    """
    try:
        found = socket.socket(fileno=fd)
    except OSError as error:
        raise ValueError(f"descriptor {fd} is no socket that can be listened on: {error.strerror}") from None
    is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
    if not is_tcp or not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        found.detach()  # its owner keeps it open
        raise ValueError(f"descriptor {fd} is no TCP socket that listens")
    found.set_inheritable(False)
    return found


def passed_on() -> int | None:
    """The descriptor that a service manager passes to this process by ``LISTEN_FDS`` (see sd_listen_fds(3)).

    The variables are removed from the environment, so that no program that this one starts takes them for its own.

    Returns:
        The descriptor; None where there is none, or what there is is meant for another process.

    Raises:
        ValueError: there are several.
    """
    count, pid = os.environ.pop("LISTEN_FDS", ""), os.environ.pop("LISTEN_PID", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal() or count == "0":
        return None
    if count != "1":
        raise ValueError(f"an agent listens on one socket, and {count} are passed on (LISTEN_FDS)")
    return _FIRST_FD


class SocketForwarder:
    """Forwards connections of an adopted socket to a socket of this host, in a thread of its own, until it is closed.

    Args:
        listening: the socket; it is closed with this.
        name: of the other socket, in the abstract namespace.
    """

    def __init__(self, listening: socket.socket, name: str) -> None:
        self._listening = listening
        self._path = f"\0{name}"
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="adopted-socket", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections, and cut the open ones. May be called again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._pass_on, sock=self._listening)
        await self._closing.wait()
        server.close()  # the tasks of its connections are cancelled with the loop

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_unix_connection(self._path)
        except OSError:
            writer.close()  # the agent listens no more
            return
        try:
            await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))
        except asyncio.CancelledError:
            return  # `close` cuts the connection
        finally:
            inner_writer.close()
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward what comes, and the end of the stream."""
    try:
        while data := await reader.read(_CHUNK_NBYTES):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.close()  # one side is gone, so nobody needs the other
