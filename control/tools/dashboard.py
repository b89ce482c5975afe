"""`serve_dashboard`: a running job in a browser: its parts, how fast they go, what they keep, what has gone wrong."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from importlib import resources
from urllib.parse import parse_qs, urlsplit

from control.errors import SupervisionError
from control.pages import Page, PageServer, Request
from control.runtime import job
from control.tools.dashboard_feed import Feed
from control.tools.status import JobStatus, status_of
from control.tools.survey import survey

INTERVAL_S = 1.0
TIMEOUT_S = 2.0
"""How long a process has to answer before it is shown as silent."""

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/tables.css": ("tables.css", "text/css; charset=utf-8"),
    "/main.js": ("main.js", "text/javascript; charset=utf-8"),
    "/model.js": ("model.js", "text/javascript; charset=utf-8"),
    "/format.js": ("format.js", "text/javascript; charset=utf-8"),
    "/view.js": ("view.js", "text/javascript; charset=utf-8"),
    "/topology.js": ("topology.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}

_HEADERS = {
    # Only what this server sends is loaded or run, nobody shows the page within another, and nobody keeps it.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class Dashboard(PageServer):
    """A dashboard that is served until it is closed; a context manager.

    Attributes:
        token: what a browser has to know; empty where everybody on this host may look.
    """

    def __init__(self, feed: Feed, port: int, host: str, token: str) -> None:
        self.token = token
        pages: dict[str, Callable[[], Page]] = {
            path: partial(_file, name, kind) for path, (name, kind) in _FILES.items()
        }
        pages["/data.json"] = lambda: Page("application/json", feed.text())
        self._names = {*_LOOPBACK_NAMES, host}
        super().__init__(pages, port, host, name="control-dashboard", headers=_HEADERS, gate=self._gate)

    @property
    def url(self) -> str:
        """What to open in a browser, with the token where one is needed."""
        url = super().url
        if ipaddress.ip_address(self.host).is_unspecified:
            url = f"http://{socket.gethostname()}:{self.port}/"
        return f"{url}?token={self.token}" if self.token else url

    def _gate(self, request: Request) -> Page | None:
        if not self.token:
            return None if self._is_named_here(request) else _refusal("this address is not the dashboard's")
        cookie = f"skipper-dashboard-{self.port}"  # cookies are those of a host, whatever the port
        (given,) = parse_qs(request.query).get("token", [""])[:1]
        if self._is_token(given):
            # The address bar is not the place for it.
            keep = f"{cookie}={self.token}; Path=/; HttpOnly; SameSite=Lax"
            return Page("text/plain", "", HTTPStatus.SEE_OTHER, {"Location": "/", "Set-Cookie": keep})
        if self._is_token(_cookie(request, cookie)):
            return None
        return _refusal("this dashboard needs its token: open the address that was printed where it is served")

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())

    def _is_named_here(self, request: Request) -> bool:
        """Whether a browser was sent here by this host's name, and not by one that somebody else has led here."""
        try:
            return urlsplit(f"//{request.headers.get('Host', '')}").hostname in self._names
        except ValueError:  # that is no host
            return False


def serve_dashboard(
    port: int = 0,
    host: str = "127.0.0.1",
    *,
    interval: float = INTERVAL_S,
    timeout: float = TIMEOUT_S,
    with_token: bool | None = None,
) -> Dashboard:
    """Show this process' job in a browser: `Dashboard.url` says where.

    While somebody looks, all processes are asked once per interval, and never where nobody does. A process that does
    not answer in time is shown as silent within the interval and the time-out.

    Whoever may look reads names of processes, actors, endpoints and keys, figures, and the messages of errors.

    Args:
        port: to listen on; 0: one that is free (see `PageServer.port`).
        host: the address to listen on; ``"0.0.0.0"`` for all of this host's.
        interval: seconds between looks.
        timeout: seconds that a process has to answer.
        with_token: whether a browser needs the token that is part of the address; None: where others than this host
            reach it, which always need it.

    Returns:
        The running server. It ends with the process, or by ``close()``, or as a context manager.

    Raises:
        ValueError: ``interval`` or ``timeout`` is not positive, or ``with_token`` is false where others reach it.
        OSError: the port is taken, or the address is not this host's.
    """
    if interval <= 0 or timeout <= 0:
        raise ValueError(f"interval and timeout are positive numbers of seconds, not {interval} and {timeout}")
    address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    is_beyond = not ipaddress.ip_address(address).is_loopback
    if is_beyond and with_token is False:
        raise ValueError(f"{host} is reached by others than this host: they need a token")

    process = job.current()

    def look() -> JobStatus:
        if process.closing:  # and not of a job that begins after it
            raise SupervisionError("the job has ended")
        return status_of(survey(process, "status", True, timeout=timeout))

    token = secrets.token_urlsafe(24) if is_beyond or with_token else ""
    return Dashboard(Feed(look, interval), port, host, token)


def _file(name: str, content_type: str) -> Page:
    return Page(content_type, resources.files("control.tools").joinpath("web", name).read_text("utf-8"))


def _cookie(request: Request, name: str) -> str:
    try:
        morsel = SimpleCookie(request.headers.get("Cookie", "")).get(name)
    except CookieError:
        return ""
    return "" if morsel is None else morsel.value


def _refusal(why: str) -> Page:
    return Page("text/plain; charset=utf-8", f"{why}\n", HTTPStatus.FORBIDDEN)
