"""`PageServer`: a few pages over HTTP, made anew for everybody who asks, from threads of their own."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import Thread
from types import TracebackType
from typing import Any, ClassVar

from control.bounds import check_port


@dataclass(frozen=True, slots=True)
class Page:
    """What is answered."""

    content_type: str
    body: str
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody asks for.

    Attributes:
        path: without the query.
        query: what follows the question mark; empty where nothing does.
        headers: by name, in whatever case.
    """

    path: str
    query: str
    headers: Message


Gate = Callable[[Request], Page | None]
"""Looks at every request first: None lets it pass, a page is the answer."""

Pages = Mapping[str, Callable[[], Page]]
"""What makes each page, by its path; the first is the one that `PageServer.url` names."""


class PageServer:
    """Answers ``GET`` until it is closed; a context manager.

    Whoever reaches the address can read the pages. By default only this host does.

    Args:
        pages: see `Pages`. An exception in a page is an answer with status 500 that names its type.
        port: to listen on; 0: one that is free.
        host: the address to listen on; ``"0.0.0.0"`` for all of this host's.
        name: of the thread.
        headers: sent with every answer.
        gate: see `Gate`; None lets everybody in.

    Attributes:
        host: the address on which it listens.
        port: the port; the system's choice where 0 was asked for.

    Raises:
        ValueError: the port is none.
        OSError: the port is taken, or the address is not this host's.
    """

    def __init__(
        self,
        pages: Pages,
        port: int = 0,
        host: str = "127.0.0.1",
        *,
        name: str = "control-pages",
        headers: Mapping[str, str] | None = None,
        gate: Gate | None = None,
    ) -> None:
        check_port("port", port)
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._path = next(iter(pages))
        self._server = _Server((host, port), family, pages, headers or {}, gate)
        self.host, self.port = str(self._server.server_address[0]), int(self._server.server_address[1])
        self._thread = Thread(target=self._server.serve_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where the first page is."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}{self._path}"

    def close(self) -> None:
        """Stop listening; again is free."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> PageServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Server(ThreadingTCPServer):
    # Not `http.server.HTTPServer`: that looks up its own name first, which waits where there is no name server.
    allow_reuse_address = True
    daemon_threads = True  # a client that is stuck keeps nobody waiting

    def __init__(
        self,
        address: tuple[str, int],
        family: socket.AddressFamily,
        pages: Pages,
        headers: Mapping[str, str],
        gate: Gate | None,
    ) -> None:
        self.address_family = family
        self.pages, self.headers, self.gate = pages, headers, gate
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone away is not our trouble."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout: ClassVar[float] = 10.0  # for a client that says nothing

    def do_GET(self) -> None:
        """Answer with the page as it is now."""
        path, _, query = self.path.partition("?")
        make, gate = self.server.pages.get(path), self.server.gate
        try:
            page = None if gate is None else gate(Request(path, query, self.headers))
            if page is None and make is None:
                self.send_error(HTTPStatus.NOT_FOUND, f"there is {' and '.join(self.server.pages)}")
                return
            if page is None and make is not None:
                page = make()
        except Exception as error:  # noqa: BLE001  (whatever goes wrong is the answer, and the server goes on)
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, type(error).__name__)
            return
        assert page is not None  # the gate's, or the one that was asked for
        body = page.body.encode()
        self.send_response(page.status)
        for header, value in page.headers.items():
            self.send_header(header, value)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        """Add what every answer says."""
        for header, value in self.server.headers.items():
            self.send_header(header, value)
        super().end_headers()

    def version_string(self) -> str:
        """Nobody needs to know which Python this is."""
        return "skipper"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged: those who watch come every few seconds."""
