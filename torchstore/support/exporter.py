"""The counters of this process over HTTP, where Prometheus fetches them."""

from __future__ import annotations

from skipper.control.support.exposition import CONTENT_TYPE
from skipper.control.support.pages import Page, PageServer
from skipper.torchstore.support.metrics import metrics_text

MetricsServer = PageServer
"""Answers ``GET /metrics`` from a thread of its own until it is closed; `serve_metrics` makes one."""


def serve_metrics(
    port: int = 0, host: str = "127.0.0.1", *, store_name: str | None = None, token: str | bool | None = None
) -> PageServer:
    """Serve `metrics_text` to Prometheus: ``http://HOST:PORT/metrics``.

    Everybody who reaches the address, and knows the token where there is one, can read it. It holds figures, names of
    stores and keys, and nothing of any value. By default only this host reaches it.

    Args:
        port: To listen on; 0: one that is free (see `MetricsServer.port`).
        host: The address to listen on; ``"0.0.0.0"`` for all of this host's.
        store_name: One store; None: all that this process uses.
        token: What clients have to send, as ``Authorization: Bearer TOKEN``: a text of 16 characters or more, or True
            for a new one; None: where others than this host reach it, which always need one.

    Returns:
        The running server. It takes a thread and ends with the process, or by ``close()``, or as a context manager.

    Raises:
        ValueError: ``token`` is false where others reach it, or none that can be used.
        OSError: The port is taken, or the address is not this host's.
    """
    return PageServer(
        {"/metrics": lambda: Page(CONTENT_TYPE, metrics_text(store_name))},
        port,
        host,
        name="torchstore-metrics",
        token=token,
    )
