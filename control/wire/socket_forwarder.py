"""`SocketForwarder`: forwards connections from a socket that gRPC has not made to gRPC.

gRPC listens only on its own sockets. So a thread forwards the bytes of each connection, in both directions and
unchanged (TLS included), to a socket of this host on which gRPC listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

_CHUNK_NBYTES = 1 << 16


class SocketForwarder:
    """Forwards connections of a socket to another socket of this host, in a thread of its own, until it is closed.

    Args:
        listening: the socket; it is closed with this.
        name: of the other socket, in the abstract namespace.
        most: how many connections may be open at a time; more are closed.
    """

    def __init__(self, listening: socket.socket, name: str, most: int = 1 << 30) -> None:
        self._listening = listening
        self._most = most
        self._running: set[asyncio.Task[None] | None] = set()
        """Keeps the tasks alive: nothing else holds a task that waits while its connection is half closed."""
        self._path = f"\0{name}"
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="control-forwarder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections, and cut the open ones. May be called again."""
        if not self.end():
            self._thread.join()

    def end(self) -> bool:
        """Begin to close, at once; returns whether nothing is left. May be called again."""
        with contextlib.suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(self._closing.set)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._pass_on, sock=self._listening)  # a unix socket works, too
        await self._closing.wait()
        server.close()  # the tasks of its connections are cancelled with the loop

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._running) >= self._most:
            writer.close()
            return
        task = asyncio.current_task()
        self._running.add(task)
        try:
            await self._pass_on_one(reader, writer)
        finally:
            self._running.discard(task)

    async def _pass_on_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_unix_connection(self._path)
        except OSError:
            writer.close()  # no process listens there any more
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
        writer.close()  # one side is gone, so the other is not needed
