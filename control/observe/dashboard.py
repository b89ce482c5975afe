"""`serve_dashboard`: a job in a browser: its processes and actors, their calls, output, memory and errors."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources

from skipper.commandline import CommandParser, add_port, seconds
from skipper.control.api.join import find_for_tools, visiting
from skipper.control.observe.dashboard_feed import HUNG_AFTER_S, SLOW_AFTER_S, CallBounds, Feed
from skipper.control.observe.dashboard_lookups import PATHS, DashboardLookups
from skipper.control.observe.job_source import JobSource, LiveJob
from skipper.control.observe.program import add_served_host, parser_of, run, serve, serve_until
from skipper.control.observe.record import find_record
from skipper.control.observe.recorded_job import RecordedJob
from skipper.control.runtime import current_runtime
from skipper.control.support.pages import Page, PageServer

INTERVAL_S = 1.0
TIMEOUT_S = 2.0
"""How long a process has to answer before it is shown as silent."""

_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_FILES = (
    "index.html",
    "dashboard.css",
    "tables.css",
    "pages.css",
    "theme.js",
    "main.js",
    "model.js",
    "format.js",
    "dom.js",
    "errors.js",
    "view.js",
    "cards.js",
    "charts.js",
    "bounds.js",
    "paths.js",
    "topology.js",
    "actor.js",
    "logs.js",
    "waterfall.js",
    "icon.svg",
)


class Dashboard(PageServer):
    """A dashboard that is served until it is closed; a context manager.

    Args:
        source: the job that it shows.
        port: see `PageServer`, also for the next two.
        host: the address to listen on.
        token: the token that browsers need. Without one, only this user can see output, tracebacks and stacks, and
            all users of this host can see the rest.
        interval_s: seconds between updates.
        bounds: after how long a call is shown as slow, and as hanging.

    Example:
        ```python
        from urllib.request import urlopen

        from skipper.control import this_host
        from skipper.control.observe import Dashboard, PageServer, serve_dashboard

        this_host().spawn_procs({"gpus": 2}, name="workers").initialized.get(timeout=60)
        dashboard: Dashboard
        with serve_dashboard() as dashboard:  # on 127.0.0.1, at a free port
            print(isinstance(dashboard, PageServer), urlopen(dashboard.url).status)  # True 200
        ```
    """

    def __init__(
        self,
        source: JobSource,
        port: int,
        host: str,
        token: str | bool | None,
        *,
        interval_s: float = INTERVAL_S,
        bounds: CallBounds | None = None,
    ) -> None:
        feed = Feed(source.status, interval_s, bounds, name=source.name, outcome=source.outcome)
        lookups = DashboardLookups(source)
        pages: dict[str, Callable[[], Page]] = {"/": partial(_file, "index.html")}
        pages |= {f"/{name}": partial(_file, name) for name in _FILES[1:]}
        pages["/data.json"] = lambda: Page("application/json", feed.text())
        super().__init__(
            pages,
            port,
            host,
            lookups={path: partial(lookups.answer, path) for path in PATHS},
            private=PATHS,
            name="control-dashboard",
            token=token,
        )


def serve_dashboard(
    port: int = 0,
    host: str = "127.0.0.1",
    *,
    interval: float = INTERVAL_S,
    timeout: float = TIMEOUT_S,
    with_token: bool | None = None,
    slow_after: float = SLOW_AFTER_S,
    hung_after: float = HUNG_AFTER_S,
    name: str | None = None,
) -> Dashboard:
    """Show this process' job in a browser: `Dashboard.url` says where.

    While a browser shows the page, all processes are asked once per interval; otherwise they are not asked. A process
    that does not answer in time is shown as silent, at the latest after the interval and the timeout.

    All who can open the page see the names of processes, actors, endpoints and keys, the figures, and the messages of
    errors. Output, tracebacks and stacks are shown only to browsers with the token; without a token, only to the user
    of this process.

    Args:
        port: the port to listen on; 0: a free one (see `PageServer.port`).
        host: the address to listen on; ``"0.0.0.0"`` means all addresses of this host.
        interval: seconds between updates.
        timeout: seconds to wait for the answer of a process.
        with_token: whether a browser needs the token that is part of the URL; None: only if other hosts reach the
            address. Those always need it.
        slow_after: seconds after which a call is shown as slow; a reader of the page can choose another time.
        hung_after: seconds after which a call is shown as hanging.
        name: name of the job on the page; None: the name of the script.

    Returns:
        The running server. It ends with the process, or by ``close()``, or as a context manager.

    Raises:
        ValueError: ``interval`` or ``timeout`` is not positive, ``hung_after`` is less than ``slow_after``, or
            ``with_token`` is false although other hosts reach the address.
        OSError: the port is in use, or the address is not an address of this host.
    """
    if interval <= 0 or timeout <= 0:
        raise ValueError(f"interval and timeout are positive numbers of seconds, not {interval} and {timeout}")
    source = LiveJob(current_runtime.current(), timeout, _script() if name is None else name)
    bounds = CallBounds(slow_after, hung_after)
    return Dashboard(source, port, host, with_token, interval_s=interval, bounds=bounds)


def _script() -> str:
    """The name of this process' script; empty if it has none."""
    script = sys.argv[0] if sys.argv else ""
    return "" if script == "-c" else os.path.basename(script)


def _file(name: str) -> Page:
    text = resources.files("skipper.control.observe").joinpath("web", name).read_text("utf-8")
    return Page(_KINDS[name.rpartition(".")[2]], text)


def parser(prog: str) -> CommandParser:
    """The parser of the command."""
    own = parser_of(prog, "Show a running job in a browser; prints the address to open.", timeout_s=TIMEOUT_S)
    add_port(own, default=0, what="port to listen on (default: a free one)")
    add_served_host(own)
    own.add_argument(
        "--interval",
        type=seconds,
        default=INTERVAL_S,
        metavar="S",
        help=f"seconds between updates (default: {INTERVAL_S:g})",
    )
    own.add_argument(
        "--slow-after",
        type=seconds,
        default=SLOW_AFTER_S,
        metavar="S",
        help=f"seconds after which a call is shown as slow (default: {SLOW_AFTER_S:g})",
    )
    own.add_argument(
        "--hung-after",
        type=seconds,
        default=HUNG_AFTER_S,
        metavar="S",
        help=f"seconds after which a call is shown as hanging (default: {HUNG_AFTER_S:g})",
    )
    own.add_argument(
        "--record",
        nargs="?",
        const="",
        metavar="RUN",
        help="show the record of a run that has ended (see skipper record): its folder or name (default: the latest)",
    )
    own.add_argument(
        "--token", action="store_true", help="require a token on 127.0.0.1 too, because this host has other users"
    )
    return own


def main(argv: Sequence[str], *, prog: str = "skipper dashboard") -> int:
    """Serve the dashboard of a job until Ctrl-C or the job's end; returns the exit code."""
    return run(parser(prog), argv, _serve)


def _serve(given: argparse.Namespace) -> int:
    place = f"{given.host}:{given.port}"
    if given.record is not None:
        record = find_record(given.record or None)

        def start_record() -> Dashboard:
            bounds = CallBounds(given.slow_after, given.hung_after)
            source, token = RecordedJob(record), given.token or None
            return Dashboard(source, given.port, given.host, token, interval_s=given.interval, bounds=bounds)

        return serve_until(start_record, place, lambda: False)

    def start() -> Dashboard:
        return serve_dashboard(
            given.port,
            given.host,
            interval=given.interval,
            timeout=given.timeout,
            with_token=given.token or None,
            slow_after=given.slow_after,
            hung_after=given.hung_after,
            name=find_for_tools(given.job).name,
        )

    with visiting(given.job, timeout=given.timeout) as process:
        return serve(process, start, place)
