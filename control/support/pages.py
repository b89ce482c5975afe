"""`PageServer`: a few pages over HTTP, made for each request. No client can keep others from being served.

One thread has all connections, and pages are made on others, a few at a time. Each connection carries one request and
ends with its answer, so nothing that follows a request is ever read as another one. What a client
sends, and how long the server waits for it, has a bound. If there are as many connections as allowed, the one that has
waited longest for its client is closed, so that silent clients keep nobody out.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from threading import Thread
from types import TracebackType
from urllib.parse import parse_qs, parse_qsl, quote, urlsplit

from skipper.control.support.peer_user import user_of_peer

MAX_CONNECTIONS = 64
MAX_HEAD_NBYTES = 16 << 10
MAX_HEADERS = 64
HEAD_TIMEOUT_S = 5.0
"""Seconds for the whole head of a request to arrive, even if parts of it keep arriving."""

ANSWER_TIMEOUT_S = 10.0
"""Seconds for a client to take its answer."""

_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,256}")
"""RFC 6750, 2.1, and long enough not to be guessed."""

_MOST_DISCARDED_NBYTES = 1 << 20
_PAGES_AT_ONCE = 4
_METHODS = ("GET", "HEAD")
_ONCE = ("host", "origin", "authorization", "content-length", "transfer-encoding")
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_REQUEST = re.compile(rb"([A-Z]{1,20}) ([!-~]{1,8192}) HTTP/1\.([01])")
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\t -~\x80-\xff]*?)[ \t]*")
"""RFC 9112, 3 and 5: a request line and a field, without line folding, which servers must refuse."""

_HEADERS = {
    # The browser loads and runs only what this server sends; no other page embeds the page, and no cache keeps it.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "skipper",  # nobody needs to know which Python this is
    "Connection": "close",
}


@dataclass(frozen=True, slots=True)
class Page:
    """What is answered."""

    content_type: str
    body: str
    status: HTTPStatus = HTTPStatus.OK


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    """Headers by their names in lower case."""


class _RefusedError(Exception):
    """A request is answered with an error.

    Attributes:
        status: status of the answer.
    """

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


Pages = Mapping[str, Callable[[], Page]]
"""What makes each page, by its path; the first is the one that `PageServer.url` names."""

Lookups = Mapping[str, Callable[[Mapping[str, str]], Page]]
"""What makes each page that depends on the query of its address, by its path.

It gets the fields of the query, the last of each name. They may hold anything."""


class PageServer:
    """Answers ``GET`` and ``HEAD`` until it is closed; a context manager.

    Clients that reach the address, and send the token if there is one, can read the pages. By default only this host
    reaches it, and no token is needed; if other hosts reach it, there is always a token. Clients send it as
    ``Authorization: Bearer TOKEN``, as ``?token=TOKEN``, or as the cookie that a browser gets in return for the latter.

    Requests that a page of another site makes through a browser are refused: on this host's own addresses by the host
    name in the request (DNS rebinding), on all addresses by the origin that the browser sends.

    The example of `Dashboard` shows one.

    Args:
        pages: see `Pages`. An exception in a page becomes an answer with status 500 that names its type.
        port: the port to listen on; 0: a free one.
        host: the address to listen on; ``"0.0.0.0"`` means all addresses of this host.
        lookups: see `Lookups`; otherwise like pages.
        private: paths that other users of this host may not read: without a token only this process' user and root can.
        name: name of the thread.
        token: the token that clients need, 16 to 256 letters, digits and ``._~+/=-``; True: a new one; None: a new one
            if other hosts reach the address, else none; False: none.

    Attributes:
        host: the address on which it listens.
        port: the port; the one that the system has chosen if 0 was given.
        token: the token that clients need; empty if they need none.

    Raises:
        OSError: the port is in use, or the address is not an address of this host.
        ValueError: ``token`` is false although other hosts reach the address, or is not valid; ``port`` is not valid.
    """

    def __init__(
        self,
        pages: Pages,
        port: int = 0,
        host: str = "127.0.0.1",
        *,
        lookups: Lookups | None = None,
        private: Collection[str] = (),
        name: str = "control-pages",
        token: str | bool | None = None,
    ) -> None:
        if not 0 <= port < 1 << 16:
            raise ValueError(f"a port is a number from 0 to 65535, not {port}")
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        is_beyond = not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
        self.token = _token_of(token, host, is_beyond=is_beyond)
        self._names = None if is_beyond else frozenset({*_LOOPBACK_NAMES, host.lower()})
        self._pages = dict(pages)
        self._lookups = dict(lookups or {})
        self._private = frozenset(private)
        listener = socket.create_server(address, family=family, backlog=128)
        self.host, self.port = str(listener.getsockname()[0]), int(listener.getsockname()[1])
        self._listener = listener
        self._loop = asyncio.SelectorEventLoop()
        self._closing = asyncio.Event()
        self._making = asyncio.Semaphore(_PAGES_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        """One task for each connection, including those that there is no room for."""
        self._connections: set[asyncio.Task[None]] = set()
        self._waiting: dict[asyncio.Task[None], None] = {}
        """The tasks that wait for their clients, the longest first."""
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The URL of the first page, with the token if one is needed."""
        host = socket.gethostname() if ipaddress.ip_address(self.host).is_unspecified else self.host
        url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}{next(iter(self._pages))}"
        return f"{url}?token={quote(self.token, safe='')}" if self.token else url

    def close(self) -> None:
        """Stop listening, and close all connections; calling it again does nothing."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it is ending at this moment
                self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def __enter__(self) -> PageServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # On the thread

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve_all())

    async def _serve_all(self) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # of clients, for example
        server = await asyncio.start_server(self._accept, sock=self._listener, limit=MAX_HEAD_NBYTES)
        await self._closing.wait()
        # What asyncio is accepting must become a connection before its server is closed: it would be left open.
        self._loop.remove_reader(self._listener)
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others & self._tasks:
                task.cancel()
            await asyncio.wait(others)
        server.close()
        await asyncio.sleep(0)  # connections end in the loop's next turn

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # also if it is cancelled before it has begun

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # this is one
        try:
            if self._has_room():
                self._connections.add(task)
                await self._answer(task, reader, writer)
        except (asyncio.CancelledError, asyncio.IncompleteReadError, TimeoutError, OSError):
            return  # it was closed for another, or has gone, or is too slow
        finally:
            self._connections.discard(task)

    def _has_room(self) -> bool:
        """Whether there is room for another connection; if needed, closes the one that waits longest for its client."""
        if len(self._connections) < MAX_CONNECTIONS:
            return True
        longest = next(iter(self._waiting), None)
        if longest is None:
            return False
        del self._waiting[longest]
        self._connections.discard(longest)
        longest.cancel()
        return True

    @contextlib.asynccontextmanager
    async def _waits(self, task: asyncio.Task[None], most_s: float) -> AsyncIterator[None]:
        self._waiting[task] = None
        try:
            async with asyncio.timeout(most_s):
                yield
        finally:
            self._waiting.pop(task, None)

    async def _answer(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        has_body = True
        try:
            async with self._waits(task, HEAD_TIMEOUT_S):
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except asyncio.LimitOverrunError:
                    status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
                    raise _RefusedError(status, f"the head of a request has {MAX_HEAD_NBYTES} bytes at most") from None
            request = _parsed(head)
            has_body = request.method != "HEAD"
            page, headers = await self._page(request, writer)
        except _RefusedError as refusal:
            page = Page("text/plain; charset=utf-8", f"{refusal}\n", refusal.status)
            headers = {"Allow": ", ".join(_METHODS)} if refusal.status is HTTPStatus.METHOD_NOT_ALLOWED else {}
        async with self._waits(task, ANSWER_TIMEOUT_S):
            writer.transport.set_write_buffer_limits(0)  # `drain` waits until all is sent
            writer.write(_encoded(page, headers, has_body=has_body))
            await writer.drain()
            writer.write_eof()
            # A connection that is closed with something unread is reset, and the client may lose its answer.
            discarded = 0
            while discarded < _MOST_DISCARDED_NBYTES and (rest := await reader.read(MAX_HEAD_NBYTES)):
                discarded += len(rest)

    async def _page(self, request: _Request, writer: asyncio.StreamWriter) -> tuple[Page, Mapping[str, str]]:
        self._check_origin(request)
        if self.token:
            (given,) = parse_qs(request.query, max_num_fields=MAX_HEADERS).get("token", [""])[:1]
            if self._is_token(given) and "text/html" in request.headers.get("accept", ""):
                # A browser: the address bar is not the place for it.
                keep = f"{self._cookie}={self.token}; Path=/; HttpOnly; SameSite=Lax"
                return Page("text/plain", "", HTTPStatus.SEE_OTHER), {
                    "Location": next(iter(self._pages)),
                    "Set-Cookie": keep,
                }
            scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
            others = (bearer.strip() if scheme.lower() == "bearer" else "", self._kept(request))
            if not any(self._is_token(known) for known in (given, *others)):
                raise _RefusedError(
                    HTTPStatus.FORBIDDEN,
                    "this page needs its token: open the address that was printed where it is served, "
                    "or send 'Authorization: Bearer TOKEN'",
                )
        make = self._maker_of(request)
        if request.path in self._private and not self.token:
            peer, own = (writer.get_extra_info(end)[:2] for end in ("peername", "sockname"))
            return await self._made(lambda: make() if _is_of_this_user(peer, own) else _NOT_YOURS), {}
        return await self._made(make), {}

    def _maker_of(self, request: _Request) -> Callable[[], Page]:
        make = self._pages.get(request.path)
        if make is not None:
            return make
        look_up = self._lookups.get(request.path)
        if look_up is None:
            raise _RefusedError(HTTPStatus.NOT_FOUND, f"there is {' and '.join([*self._pages, *self._lookups])}")
        try:
            fields = dict(parse_qsl(request.query, keep_blank_values=True, max_num_fields=MAX_HEADERS))
        except ValueError:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, f"a query has {MAX_HEADERS} fields at most") from None
        return lambda: look_up(fields)

    def _check_origin(self, request: _Request) -> None:
        """Refuse requests that a page of another site makes through a browser."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        try:
            name = urlsplit(f"//{host}").hostname
            is_ours = origin is None or urlsplit(origin).netloc == host
        except ValueError:  # not a valid host
            name, is_ours = None, False
        if self._names is not None and name not in self._names:
            raise _RefusedError(HTTPStatus.FORBIDDEN, "the host in the address is not that of this server")
        kind = [request.headers.get(f"sec-fetch-{what}", "") for what in ("site", "mode", "dest")]
        is_visit = kind[1:] == ["navigate", "document"]
        if not is_ours or (kind[0] in ("cross-site", "same-site") and not is_visit):
            raise _RefusedError(HTTPStatus.FORBIDDEN, "this request came from a page of another site")

    async def _made(self, make: Callable[[], Page]) -> Page:
        loop = asyncio.get_running_loop()
        page: asyncio.Future[Page] = loop.create_future()

        def settle(result: Page) -> None:
            if not page.done():
                page.set_result(result)

        def work() -> None:
            try:
                result = make()
            except Exception as error:  # noqa: BLE001  (any error becomes the answer, and the server continues)
                result = Page("text/plain", f"{type(error).__name__}\n", HTTPStatus.INTERNAL_SERVER_ERROR)
            with contextlib.suppress(RuntimeError):  # the server has been closed
                loop.call_soon_threadsafe(settle, result)

        async with self._making:
            Thread(target=work, name=f"{self._thread.name}-page", daemon=True).start()
            return await page

    @property
    def _cookie(self) -> str:
        return f"skipper-token-{self.port}"  # cookies belong to a host, for all ports

    def _kept(self, request: _Request) -> str:
        """The token that a browser has kept."""
        try:
            morsel = SimpleCookie(request.headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return ""
        return "" if morsel is None else morsel.value

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())


_NOT_YOURS = Page(
    "text/plain; charset=utf-8",
    "only the user of the job may read output, tracebacks and stacks: serve the page with a token (--token), and open "
    "the address that is printed\n",
    HTTPStatus.FORBIDDEN,
)


def _is_of_this_user(peer: tuple[str, int], own: tuple[str, int]) -> bool:
    """Whether a connection over the loopback was made by this user, or root; False if that is not known."""
    try:
        return user_of_peer(peer, own) in (os.geteuid(), 0)
    except (OSError, ValueError):
        return False


def _token_of(token: str | bool | None, host: str, *, is_beyond: bool) -> str:
    if not token:
        if is_beyond and token is not None:
            raise ValueError(f"other hosts can reach {host}: the page needs a token")
        return secrets.token_urlsafe(24) if is_beyond else ""
    if token is True:
        return secrets.token_urlsafe(24)
    if not _TOKEN.fullmatch(token):
        raise ValueError("a token has 16 to 256 letters, digits and '._~+/=-'")  # and is not repeated in a message
    return token


def _parsed(head: bytes) -> _Request:
    """A request's head.

    Raises:
        _RefusedError: it is not valid, or no client of ours sends it.
    """
    first, *fields = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    line = _REQUEST.fullmatch(first)
    if line is None or not line[2].startswith(b"/"):
        raise _RefusedError(HTTPStatus.BAD_REQUEST, "this is not a request of HTTP/1.1")
    if len(fields) > MAX_HEADERS:
        raise _RefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a request has {MAX_HEADERS} fields at most")
    headers: dict[str, str] = {}
    for field in fields:
        found = _HEADER.fullmatch(field)
        if found is None:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "a header field is malformed")
        name = found[1].decode().lower()
        if name in headers and name in _ONCE:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, f"the request has two {name} headers")
        headers.setdefault(name, found[2].decode("latin-1"))
    if line[3] == b"1" and "host" not in headers:
        raise _RefusedError(HTTPStatus.BAD_REQUEST, "the request has no Host header")
    method = line[1].decode()
    if method not in _METHODS:
        raise _RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, f"only these methods are allowed: {' and '.join(_METHODS)}")
    if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
        raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a request for a page has no body")
    path, _, query = line[2].decode().partition("?")
    return _Request(method, path, query, headers)


def _encoded(page: Page, headers: Mapping[str, str], *, has_body: bool) -> bytes:
    body = page.body.encode()
    fields = {**_HEADERS, **headers, "Content-Type": page.content_type, "Content-Length": str(len(body))}
    lines = [
        f"HTTP/1.1 {page.status.value} {page.status.phrase}",
        *(f"{name}: {text}" for name, text in fields.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body if has_body else b"")
