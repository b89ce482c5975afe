"""`serve_dashboard`: a running job in a browser: its parts, how fast they go, what they keep, what has gone wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import resources

from skipper.control.model.errors import SupervisionError
from skipper.control.observe.dashboard_feed import Feed
from skipper.control.observe.job_query import survey
from skipper.control.observe.status import JobStatus, status_of
from skipper.control.runtime import current_runtime
from skipper.control.support.pages import Page, PageServer

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


class Dashboard(PageServer):
    """A dashboard that is served until it is closed; a context manager.

    Args:
        feed: what it shows.
        port: as of `PageServer`, like the next two.
        host: where it listens.
        token: what browsers have to know.
    """

    def __init__(self, feed: Feed, port: int, host: str, token: str | bool | None) -> None:
        pages: dict[str, Callable[[], Page]] = {
            path: partial(_file, name, kind) for path, (name, kind) in _FILES.items()
        }
        pages["/data.json"] = lambda: Page("application/json", feed.text())
        super().__init__(pages, port, host, name="control-dashboard", token=token)


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
    process = current_runtime.current()

    def look() -> JobStatus:
        if process.closing:  # and not of a job that begins after it
            raise SupervisionError("the job has ended")
        return status_of(survey(process, "status", True, timeout=timeout))

    return Dashboard(Feed(look, interval), port, host, with_token)


def _file(name: str, content_type: str) -> Page:
    return Page(content_type, resources.files("skipper.control.observe").joinpath("web", name).read_text("utf-8"))
