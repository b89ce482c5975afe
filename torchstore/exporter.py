"""The counters of this process over HTTP, where Prometheus fetches them."""

from __future__ import annotations

import socket
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import Thread
from types import TracebackType
from typing import Any, ClassVar

from torchstore.metrics import metrics_text

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of Prometheus' text format, as its documentation of exposition formats says."""


class MetricsServer:
    """Answers ``GET /metrics`` from a thread of its own until it is closed; `serve_metrics` makes one.

    Attributes:
        host: The address on which it listens.
        port: The port; the system's choice where 0 was asked for.
    """

    def __init__(self, server: _Server) -> None:
        self._server = server
        self.host, self.port = str(server.server_address[0]), int(server.server_address[1])
        self._thread = Thread(target=server.serve_forever, name="torchstore-metrics", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where the counters are."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening; again is free."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def serve_metrics(port: int = 0, host: str = "127.0.0.1", *, store_name: str | None = None) -> MetricsServer:
    """Serve `metrics_text` to Prometheus: ``http://HOST:PORT/metrics``.

    Whoever reaches the address can read it. It holds figures, names of stores and keys, and nothing of any value; by
    default only this host reaches it.

    Args:
        port: To listen on; 0: one that is free (see `MetricsServer.port`).
        host: The address to listen on; ``"0.0.0.0"`` for all of this host's.
        store_name: One store; None: all that this process uses.

    Returns:
        The running server. It takes a thread and ends with the process, or by ``close()``, or as a context manager.

    Raises:
        OSError: The port is taken, or the address is not this host's.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return MetricsServer(_Server((host, port), family, store_name))


class _Server(ThreadingTCPServer):
    # Not `http.server.HTTPServer`: that looks up its own name first, which waits where there is no name server.
    allow_reuse_address = True
    daemon_threads = True  # a client that is stuck keeps nobody waiting

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily, store_name: str | None) -> None:
        self.address_family = family
        self.store_name = store_name
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone away is not our trouble."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout: ClassVar[float] = 10.0  # for a client that says nothing

    def do_GET(self) -> None:
        """Answer with the counters as they are now."""
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, "the counters are under /metrics")
            return
        body = metrics_text(self.server.store_name).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged: Prometheus comes every few seconds."""
