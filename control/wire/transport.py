"""`Transport`: this process' gRPC server and its links to other processes, all on one event loop.

Between two processes there is one stream, dialed by whoever has something to say first. When both dial at once, the
dial of the process with the smaller id stands, and the other side's is turned away.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc import aio as _typed_aio

from control.errors import AuthenticationError, ProtocolError, WireError
from control.wire import auth
from control.wire.envelope import NO_SIGN_OF_LIFE, Envelope, Kind, ProcessRef
from control.wire.frames import MAX_MESSAGE_NBYTES, decode_process, encode_process
from control.wire.link import Deliver, Link

aio: Any = _typed_aio  # the published stubs lag behind the library

_WELCOME = b"\x01"
HANDSHAKE_TIMEOUT_S = 10.0
"""A stranger that connects and then says nothing is turned away after this long."""

MAX_STRANGERS = 256
"""Streams that have not proven themselves yet; one more costs the oldest of them its place."""

_SERVICE = "skipper.control.v1.Link"
_METHOD = f"/{_SERVICE}/Connect"
_VERSION_KEY, _PROCESS_KEY, _NONCE_KEY, _PROOF_KEY = (
    "skipper-version",
    "skipper-process-bin",
    "skipper-nonce-bin",
    "skipper-proof-bin",
)
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
    ("grpc.max_metadata_size", 8 << 10),
)


def _server_options() -> tuple[tuple[str, int], ...]:
    """What bounds a stranger's means; a peer has one stream on its connection, which never idles."""
    bound_ms = int(1000 * HANDSHAKE_TIMEOUT_S)
    return (
        *_OPTIONS,
        ("grpc.server_handshake_timeout_ms", bound_ms),
        ("grpc.max_connection_idle_ms", bound_ms),
        ("grpc.max_concurrent_streams", 4),
    )


class _ServerStream:
    def __init__(self, context: Any) -> None:
        self._context = context

    async def read(self) -> bytes | None:
        message = await self._context.read()
        return None if message is aio.EOF else message

    async def write(self, message: bytes) -> None:
        await self._context.write(message)


class _ClientStream:
    def __init__(self, call: Any) -> None:
        self._call = call

    async def read(self) -> bytes | None:
        message = await self._call.read()
        if message is aio.EOF:
            status = await self._call.code()
            if status is not grpc.StatusCode.OK:
                raise WireError(f"{status.name}: {await self._call.details()}")
            return None
        return message  # type: ignore[no-any-return]

    async def write(self, message: bytes) -> None:
        await self._call.write(message)


class Transport:
    """The links of one process.

    Args:
        me: this process; it listens on ``me.address``.
        secret: the job's secret.
        deliver: takes every envelope that arrives, on the loop thread.
        on_lost: told once for each process whose link is lost, on the loop thread, with the reason.
        on_connected: told when a link's stream stands, on the loop thread.
        on_dial: told when a process is being dialed, on the loop thread.
        heartbeat_s: silence after which a process counts as unreachable.
        connect_timeout_s: how long to wait for a process to become reachable.
    """

    def __init__(
        self,
        me: ProcessRef,
        secret: bytes,
        loop: asyncio.AbstractEventLoop,
        *,
        deliver: Deliver,
        on_lost: Callable[[ProcessRef, str], None],
        on_connected: Callable[[ProcessRef], None],
        on_dial: Callable[[ProcessRef], None],
        heartbeat_s: float,
        connect_timeout_s: float,
    ) -> None:
        self._me = me
        self._secret = secret
        self._loop = loop
        self._deliver = deliver
        self._on_lost = on_lost
        self._on_connected = on_connected
        self._on_dial = on_dial
        self._heartbeat_s = heartbeat_s
        self._connect_timeout_s = connect_timeout_s
        self._links: dict[str, Link] = {}
        self._lock = threading.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._server: Any = None
        self._closed = False
        self._patient: set[str] = set()
        self._strangers: dict[asyncio.Timeout, None] = {}

    async def start(self) -> None:
        """Listen.

        Raises:
            WireError: the address cannot be listened on.
        """
        server = aio.server(options=_server_options())
        handler = grpc.stream_stream_rpc_method_handler(self._accept)  # no serializers: raw bytes
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Connect": handler}),))
        try:
            server.add_insecure_port(self._me.address)
        except RuntimeError as error:
            raise WireError(f"cannot listen on {self._me.address}: {error}") from error
        await server.start()
        self._server = server
        self._spawn(self._watch_heartbeats())

    def find(self, process_id: str) -> Link | None:
        """The link to this process, if there is one. From any thread."""
        return self._links.get(process_id)

    def link(self, peer: ProcessRef) -> Link:
        """The link to ``peer``, which is dialed if nobody did before. From any thread."""
        link = self._links.get(peer.id)
        if link is None:
            link = self._new_link(peer)
            self._loop.call_soon_threadsafe(self._start_dialing, link)
        return link

    def expect(self, peer: ProcessRef) -> Link:
        """The link to a process that will dial us, as one does that we launch. From any thread."""
        return self._links.get(peer.id) or self._new_link(peer)

    def be_patient_with(self, peer: ProcessRef) -> None:
        """Let silence alone never count as this peer's death: for the process that launched us."""
        self._patient.add(peer.id)

    def lose(self, peer: ProcessRef, reason: str) -> None:
        """Give up the link to ``peer``, whoever dials. On the loop thread."""
        link = self._links.get(peer.id) or self._new_link(peer)
        if link.lose(reason) and not self._closed:
            self._on_lost(link.peer, reason)

    def forget(self, process_id: str) -> None:
        """Let go of a lost link: whoever still sends there finds out anew that nobody answers. On the loop thread."""
        link = self._links.get(process_id)
        if link is not None and link.lost is not None:
            del self._links[process_id]

    async def close(self, *, flush_timeout_s: float = 0.5) -> None:
        """Say goodbye, hand what was posted to the transport, and end every stream."""
        if self._closed:
            return
        self._closed = True
        for link in self._links.values():
            link.post(Envelope(Kind.BYE))
        if self._serving:
            await asyncio.wait(self._serving, timeout=flush_timeout_s)
        for link in list(self._links.values()):
            link.lose("this process has shut down")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(grace=flush_timeout_s)  # a grace makes the goodbye to its clients a silent one

    def _new_link(self, peer: ProcessRef) -> Link:
        with self._lock:
            link = self._links.get(peer.id)
            if link is None:
                link = self._links[peer.id] = Link(peer, self._loop, self._deliver)
            return link

    def _spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start_dialing(self, link: Link) -> None:
        if not (link.connected or link.dialing or link.lost or self._closed):
            link.dialing = True
            self._spawn(self._dial(link, self._loop.time() + self._connect_timeout_s))
            self._on_dial(link.peer)

    async def _serve(self, link: Link, stream: _ServerStream | _ClientStream, *, greeting: bytes = b"") -> None:
        """Run the link over an authenticated stream, to its end."""
        task = asyncio.current_task()
        assert task is not None  # handlers and dials run as tasks
        self._serving.add(task)
        self._loop.call_soon(self._on_connected, link.peer)
        reason = "the connection was closed"
        try:
            if greeting:
                await stream.write(greeting)
            reason = await link.run(stream)
        finally:
            self._serving.discard(task)
            if not self._closed:
                self.lose(link.peer, reason)

    async def _dial(self, link: Link, deadline: float) -> None:
        me, peer = encode_process(self._me), encode_process(link.peer)
        nonce = auth.new_nonce()
        metadata = ((_VERSION_KEY, auth.VERSION), (_PROCESS_KEY, me), (_NONCE_KEY, nonce))
        async with aio.insecure_channel(link.peer.address, options=_OPTIONS) as channel:
            call = channel.stream_stream(_METHOD)(metadata=metadata, wait_for_ready=True)
            try:
                async with asyncio.timeout_at(deadline):
                    answer = dict(await call.initial_metadata())
                    theirs = answer.get(_NONCE_KEY)
                    if not isinstance(theirs, bytes) or len(theirs) != auth.NONCE_NBYTES:
                        raise WireError(f"turned away: {await call.details()}")
                    transcript = (nonce, theirs, me, peer)
                    if not auth.verify(auth.server_proof(self._secret, *transcript), answer.get(_PROOF_KEY)):
                        raise AuthenticationError("whoever listens there does not know the job's secret")
                    await call.write(auth.client_proof(self._secret, *transcript))
                    if await call.read() != _WELCOME:
                        raise WireError(f"turned away: {await call.details()}")
            except TimeoutError:
                self.lose(link.peer, f"it could not be reached within {self._connect_timeout_s:g} s")
            except (WireError, aio.AioRpcError, asyncio.InvalidStateError) as error:
                code = await call.code() if call.done() else None
                if code is grpc.StatusCode.DEADLINE_EXCEEDED:  # a flood of strangers has cost us our place there
                    self._spawn(self._dial(link, deadline))
                    return
                link.dialing = False
                if code is grpc.StatusCode.ALREADY_EXISTS:
                    await self._await_their_dial(link)
                else:
                    self.lose(link.peer, f"it could not be reached ({error})")
            else:
                link.dialing = False
                await self._serve(link, _ClientStream(call))

    async def _await_their_dial(self, link: Link) -> None:
        """Both dialed at once and theirs stands: it is on its way."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await asyncio.shield(link.up)
        except TimeoutError:
            self.lose(link.peer, f"its own dial did not arrive within {self._connect_timeout_s:g} s")

    async def _accept(self, _requests: object, context: Any) -> None:
        """Serve one incoming stream; a stranger gets no further than the comparison of 32 bytes."""
        metadata: dict[str, Any] = dict(context.invocation_metadata())
        if metadata.get(_VERSION_KEY) != auth.VERSION:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"this process speaks version {auth.VERSION}")
        nonce, encoded = metadata.get(_NONCE_KEY, b""), metadata.get(_PROCESS_KEY, b"")
        if len(nonce) != auth.NONCE_NBYTES:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no nonce")
        ours = auth.new_nonce()
        transcript = (nonce, ours, encoded, encode_process(self._me))
        proof = auth.server_proof(self._secret, *transcript)
        await context.send_initial_metadata(((_NONCE_KEY, ours), (_PROOF_KEY, proof)))
        try:
            async with self._patience_with_a_stranger():
                first = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no proof came")
        if not auth.verify(auth.client_proof(self._secret, *transcript), first):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong proof")
        try:
            peer = decode_process(encoded)
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        link = self._links.get(peer.id) or self._new_link(peer)
        ours_stands = link.dialing and self._me.id < peer.id
        if link.lost or self._closed:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, link.lost or "this process shuts down")
        if link.connected or ours_stands:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "there is a stream already")
        link.connected = True
        await self._serve(link, _ServerStream(context), greeting=_WELCOME)

    @contextlib.asynccontextmanager
    async def _patience_with_a_stranger(self) -> AsyncIterator[None]:
        """Bound the wait for a proof in time and in number."""
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.reschedule(self._loop.time())
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S) as patience:
            self._strangers[patience] = None
            try:
                yield
            finally:
                self._strangers.pop(patience, None)

    async def _watch_heartbeats(self) -> None:
        """Show signs of life on every link and give up those that show none."""
        interval = self._heartbeat_s / 4
        while True:
            before = time.monotonic()
            await asyncio.sleep(interval)
            now = time.monotonic()
            was_frozen = now - before > 2 * interval + 0.5
            for link in list(self._links.values()):
                if not link.connected:
                    continue
                if was_frozen:
                    link.heard()  # it was this process that stood still: the others deserve a fresh start
                if now - link.last_heard_s > self._heartbeat_s and link.peer.id not in self._patient:
                    self.lose(link.peer, f"it showed {NO_SIGN_OF_LIFE} for {self._heartbeat_s:g} s")
                else:
                    link.post(Envelope(Kind.PING))
