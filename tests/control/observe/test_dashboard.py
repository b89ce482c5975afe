"""The dashboard in a real browser: what it shows of a real job, and whom it shows nothing."""

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from skipper.control import ActorError, ActorMesh, this_host
from skipper.control.observe import Dashboard, JobStatus, Table, job_status, report_table, serve_dashboard
from skipper.control.observe.dashboard_feed import KEPT_EVENTS, MAX_MESSAGE, Feed
from skipper.control.observe.record import RecordWriter
from skipper.control.runtime import status_providers
from skipper.control.runtime.history import Event
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S, REPOSITORY, Failures, Script, wait_until
from tests.control.observe.browser import PATIENCE_MS, browsers, needs_chromium
from tests.control.observe.sources import SourceOf
from tests.freezing import freeze

SCRIPT = "<script>window.hacked = true</script><img src=x onerror='window.hacked = true'>"

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from browsers()


@pytest.fixture
def dashboard(echoes: ActorMesh[Echo]) -> Iterator[Dashboard]:
    with serve_dashboard(interval=0.2, timeout=1.5) as dashboard:
        yield dashboard


@pytest.fixture
def page(browser: Browser, dashboard: Dashboard) -> Iterator[Page]:
    """The dashboard as it is seen; nothing that the browser complains of is let pass."""
    complaints: list[str] = []
    with browser.new_context() as context:
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(dashboard.url)
        yield page
        assert not complaints
        assert page.evaluate("window.hacked") is None


def ask(dashboard: Dashboard, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """Status, headers and body of an answer, without following where it leads."""
    connection = http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read().decode()
    finally:
        connection.close()


@needs_chromium
def test_the_page_shows_processes_and_actors_as_they_are(page: Page, echoes: ActorMesh[Echo]) -> None:
    pids = echoes.pid.call().get(PATIENCE_S)
    expect(page.locator("#health")).to_have_text("healthy")
    for rank, pid in enumerate(pids):
        expect(page.locator("tr.process", has_text=f"workers{{'gpus': {rank}}}")).to_contain_text(str(pid))
        expect(page.locator("tr.actor", has_text=f"echoes{{'gpus': {rank}}} · Echo")).to_contain_text("idle")
    expect(page.locator("tr.process", has_text="script")).to_contain_text(str(os.getpid()))
    expect(page.locator("tr.host")).to_contain_text(os.uname().nodename)


@needs_chromium
def test_the_page_is_live(page: Page, blocked: ActorMesh[Echo]) -> None:
    waiting = [blocked.echo.call_one(1) for _ in range(3)]
    actor = page.locator("tr.actor", has_text="echoes{'gpus': 1}")
    expect(actor.locator(".state")).to_contain_text("busy run")
    expect(actor.locator("td[data-label=queue]")).to_have_text("3")
    expect(page.locator("li[data-name=queued] .tile-value")).to_have_text("3")
    assert not any(future.done() for future in waiting)


@needs_chromium
def test_rates_are_those_of_what_happens(page: Page, echoes: ActorMesh[Echo]) -> None:
    over = threading.Event()

    def call() -> None:
        while not over.is_set():
            echoes.echo.call(1).get(PATIENCE_S)

    caller = threading.Thread(target=call)
    caller.start()
    try:
        calls = page.locator("tr.actor", has_text="echoes{'gpus': 0}").locator("td[data-label='calls/s']")
        page.wait_for_function(
            "cell => parseFloat(cell.textContent.replace(/\\s/g, '')) > 5", arg=calls.element_handle()
        )
        line = page.locator("li[data-name=calls] polyline")
        page.wait_for_function("line => line.points.length > 4", arg=line.element_handle())
    finally:
        over.set()
        caller.join()


@needs_chromium
def test_a_silent_process_is_shown_as_silent_and_then_as_well_again(page: Page, echoes: ActorMesh[Echo]) -> None:
    pid = echoes.slice(gpus=0).pid.call_one().get(PATIENCE_S)
    process = page.locator("tr.process", has_text="workers{'gpus': 0}")
    freeze(pid)
    try:
        expect(process.locator(".state")).to_have_text("silent")
        expect(page.locator("#banner")).to_have_text("No answer from workers{'gpus': 0}.")
        expect(page.locator("#health")).to_have_text("1 silent")
        assert "1 silent" in page.title()
    finally:
        os.kill(pid, signal.SIGCONT)
    expect(process.locator(".state")).to_have_text("up")
    expect(page.locator("#banner")).to_be_hidden()


@needs_chromium
def test_a_death_is_told_and_the_process_leaves_the_page(page: Page, failures: Failures) -> None:
    mortal = this_host().spawn_procs(name="mortal").spawn("mortal", Echo)
    pid = mortal.pid.call_one().get(PATIENCE_S)
    process = page.locator("tr.process", has_text="mortal")
    expect(process).to_contain_text(str(pid))
    os.kill(pid, signal.SIGKILL)
    failures.wait()
    death = page.locator("li.event[data-kind=death]", has_text="mortal").first
    expect(death).to_contain_text(f"pid {pid} was killed by signal 9 (SIGKILL)")
    expect(process).to_have_count(0)


@needs_chromium
def test_an_error_appears_and_what_it_says_stays_text(page: Page, echoes: ActorMesh[Echo]) -> None:
    with pytest.raises(ActorError):
        echoes.slice(gpus=1).fail.call_one(ValueError(SCRIPT)).get(PATIENCE_S)
    error = page.locator("li.event[data-kind=error]", has_text="window.hacked").first
    expect(error.locator(".event-who")).to_have_text("echoes{'gpus': 1}.fail")
    expect(error.locator(".event-message")).to_have_text(f"ValueError: {SCRIPT}")
    expect(page.locator("tr.actor", has_text="echoes{'gpus': 1}").locator("td[data-label=errors]")).to_have_text("1")


@needs_chromium
def test_tables_are_shown_and_names_within_them_stay_text(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_providers._tables, "_by_part", {})
    eggs = [1]
    report_table("kitchen", lambda: Table(f"Kitchen {SCRIPT}", ("what", "bytes"), [(SCRIPT, 2048 * eggs[0])], 7))
    card = page.locator(".tables section", has_text="Kitchen")
    expect(card.locator("h2")).to_have_text(f"Kitchen {SCRIPT}")
    expect(card.locator("tbody td")).to_have_text([SCRIPT, "2 KiB"])
    expect(card).to_contain_text("7 rows more")
    eggs[0] = 2
    expect(card.locator("tbody td").nth(1)).to_have_text("4 KiB")
    report_table("kitchen", None)
    expect(card).to_have_count(0)


@needs_chromium
def test_the_filter_leaves_what_it_names(page: Page, echoes: ActorMesh[Echo]) -> None:
    page.locator("#filter").fill("gpus': 1")
    expect(page.locator("#topology tbody tr:visible")).to_have_count(2)
    page.locator("#filter").fill("nobody has this name")
    expect(page.locator("#no-match")).to_be_visible()


@needs_chromium
def test_sixty_four_processes_fit_a_phone(browser: Browser, served: object, echoes: ActorMesh[Echo]) -> None:
    echoes.pid.call().get(PATIENCE_S)
    one = job_status()
    worker = one.processes[-1]
    many = [dataclasses.replace(worker, id=f"{worker.id}{rank}", name=f"rank {rank:02}") for rank in range(64)]
    crowd = dataclasses.replace(one, processes=[one.processes[0], *many])
    with (
        Dashboard(SourceOf(crowd), 0, "127.0.0.1", "", interval_s=0.2) as dashboard,
        browser.new_context(viewport={"width": 400, "height": 800}, color_scheme="dark") as context,
    ):
        page = context.new_page()
        page.goto(dashboard.url)
        expect(page.locator("tr.process")).to_have_count(65)
        expect(page.locator("tr.process", has_text="rank 63")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


@needs_chromium
def test_a_server_that_is_gone_is_said_to_be(browser: Browser, echoes: ActorMesh[Echo]) -> None:
    with browser.new_context() as context:
        with serve_dashboard(interval=0.2) as dashboard:
            page = context.new_page()
            page.goto(dashboard.url)
            expect(page.locator("#health")).to_have_text("healthy")
        expect(page.locator("#health")).to_have_text("no connection")
        expect(page.locator("#banner")).to_contain_text("The page shows old values")


@needs_chromium
def test_a_browser_with_the_token_stays_in_and_the_address_bar_forgets_it(
    browser: Browser, echoes: ActorMesh[Echo]
) -> None:
    with serve_dashboard(interval=0.2, with_token=True) as dashboard, browser.new_context() as context:
        page = context.new_page()
        page.goto(dashboard.url)
        assert dashboard.token in dashboard.url
        assert page.url == f"http://127.0.0.1:{dashboard.port}/"
        expect(page.locator("#health")).to_have_text("healthy")
        (cookie,) = context.cookies()
        assert cookie["httpOnly"]


def test_without_the_token_everything_is_refused(echoes: ActorMesh[Echo], capfd: pytest.CaptureFixture[str]) -> None:
    with serve_dashboard(with_token=True) as dashboard:
        cookie = f"skipper-token-{dashboard.port}"
        wrong = dashboard.token[:-1] + ("a" if dashboard.token[-1] != "a" else "b")
        for path in (
            "/",
            "/data.json",
            "/main.js",
            "/nothing",
            f"/?token={wrong}",
            "/?token=",
            "/data.json?token=%C3%A9",
        ):
            assert ask(dashboard, path)[0] == 403
        assert ask(dashboard, "/data.json", Cookie=f"{cookie}={wrong}")[0] == 403
        assert ask(dashboard, "/data.json", Cookie="a=b; ;;=")[0] == 403
        assert ask(dashboard, "/data.json", Cookie=f"{cookie}={dashboard.token}")[0] == 200
        status, headers, _ = ask(dashboard, f"//elsewhere.example/?token={dashboard.token}", Accept="text/html")
        assert (status, headers["Location"]) == (303, "/")
        assert dashboard.token not in repr(dashboard)
    assert dashboard.token not in "".join(capfd.readouterr())


def test_whoever_listens_beyond_this_host_has_a_token(echoes: ActorMesh[Echo]) -> None:
    with pytest.raises(ValueError, match="needs a token"):
        serve_dashboard(host="0.0.0.0", with_token=False)
    with serve_dashboard(host="0.0.0.0") as dashboard:
        assert len(dashboard.token) >= 32
        assert ask(dashboard, "/data.json")[0] == 403
        assert ask(dashboard, f"/?token={dashboard.token}", Accept="text/html")[0] == 303


def test_a_page_that_another_name_leads_to_is_refused(dashboard: Dashboard) -> None:
    """DNS rebinding: a site has its own name lead to this host, and its script ask there."""
    for host in ("evil.example", f"evil.example:{dashboard.port}", "127.0.0.1.evil.example", "", "[::1"):
        status, _, body = ask(dashboard, "/data.json", Host=host)
        assert status == 403, host
        assert "processes" not in body
    for host in ("localhost", "127.0.0.1:8080", f"[::1]:{dashboard.port}"):  # also through a tunnel, at its port
        assert ask(dashboard, "/data.json", Host=host)[0] == 200


def test_every_answer_is_guarded_and_pages_are_only_read(dashboard: Dashboard) -> None:
    for path in ("/", "/dashboard.css", "/data.json", "/nothing"):
        _, headers, _ = ask(dashboard, path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Python" not in headers["Server"]
    assert ask(dashboard, "/data.json", "HEAD")[::2] == (200, "")
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT"):
        status, headers, _ = ask(dashboard, "/data.json", method)
        assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_the_job_is_asked_once_per_interval_however_many_look(echoes: ActorMesh[Echo]) -> None:
    looks: list[JobStatus] = []

    def look() -> JobStatus:
        looks.append(job_status())
        return looks[-1]

    shared = Feed(look, 60.0)
    assert not looks
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(shared.text())) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(texts), len(set(texts)), len(looks)) == (20, 1, 1)
    eager = Feed(look, 1e-9)
    assert json.loads(eager.text())["taken_s"] < json.loads(eager.text())["taken_s"]


def test_events_are_kept_up_to_a_bound_and_long_messages_cut(echoes: ActorMesh[Echo]) -> None:
    status = job_status()
    script = status.processes[0]
    assert script.report is not None

    def at(moment: int) -> JobStatus:
        errors = [Event(float(moment), "who", "x" * (MAX_MESSAGE + 1))]
        report = dataclasses.replace(script.report, errors=errors, deaths=[])
        return dataclasses.replace(status, processes=[dataclasses.replace(script, report=report)])

    moments = iter(range(KEPT_EVENTS + 10))
    kept = Feed(lambda: at(next(moments)), 1e-9)
    for _ in range(KEPT_EVENTS + 10):
        found = json.loads(kept.text())
    assert [event["at_s"] for event in found["events"]] == [float(n) for n in range(KEPT_EVENTS + 9, 9, -1)]
    assert len(found["events"][0]["message"]) < MAX_MESSAGE + 10


def test_a_job_that_has_ended_is_said_to_have(script: Callable[[str], Script]) -> None:
    running = script(
        """
        import json, urllib.request
        from skipper import control
        from skipper.control.observe import serve_dashboard
        with serve_dashboard(interval=1e-9) as dashboard:
            def problem():
                return json.load(urllib.request.urlopen(dashboard.url + "data.json"))["problem"]
            print(repr(problem()), flush=True)
            control.shutdown()
            print(problem(), flush=True)
        """
    )
    code, out, error = running.finish()
    assert (code, out, error) == (0, "''\nthe job has ended\n", "")


def test_bad_bounds_are_refused(echoes: ActorMesh[Echo]) -> None:
    for bounds in ({"interval": 0.0}, {"timeout": -1.0}, {"slow_after": 0.0}, {"slow_after": 2.0, "hung_after": 1.0}):
        with pytest.raises(ValueError, match="positive"):
            serve_dashboard(**bounds)


@pytest.fixture
def command() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a command of ``skipper``, which is gone after the test."""
    with contextlib.ExitStack() as stack:

        def start(*words: str) -> "subprocess.Popen[str]":
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": REPOSITORY}
            process = subprocess.Popen([sys.executable, "-m", "skipper.cli.main", *words], **pipes)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def test_the_command_serves_until_the_job_ends(
    script: Callable[[str], Script], command: Callable[..., "subprocess.Popen[str]"], runtime_folder: Path
) -> None:
    running = script(
        f"""
        import os, time
        os.environ["XDG_RUNTIME_DIR"] = {str(runtime_folder)!r}
        from skipper import control
        control.serve_job("shown")
        print("served", flush=True)
        time.sleep(60)
        """
    )
    assert running.line() == "served"
    serving = command("dashboard", "--job", "shown", "--token", "--timeout", "2")
    assert serving.stdout is not None
    url = urlsplit(serving.stdout.readline().strip())
    cookie = f"skipper-token-{url.port}={url.query.removeprefix('token=')}"

    def look(**headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", url.port or 0, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("GET", "/data.json", headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    assert look()[0] == 403
    shown = json.loads(look(Cookie=cookie)[1])
    assert [process["name"] for process in shown["processes"]] == ["script"]
    running.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: "no result within" in json.loads(look(Cookie=cookie)[1])["problem"], "it is out of reach")
    assert json.loads(look(Cookie=cookie)[1])["processes"][0]["pid"] == shown["processes"][0]["pid"]
    running.process.kill()
    wait_until(lambda: serving.poll() is not None, "the server ends with the job")
    assert (serving.returncode, serving.communicate()[1]) == (0, "the job has ended\n")


def test_the_command_shows_a_run_that_has_ended(
    command: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    folder = tmp_path / "record"
    folder.mkdir(mode=0o700)
    record = RecordWriter(folder)
    record.describe({"name": "policy-7", "pid": 2**30, "ended_s": 5.0, "outcome": "was killed by signal 9"})
    record.status(job_status())
    record.close()
    serving = command("dashboard", "--record", str(folder))
    assert serving.stdout is not None
    with urllib.request.urlopen(f"{serving.stdout.readline().strip()}data.json", timeout=PATIENCE_S) as answer:
        shown = json.load(answer)
    assert (shown["name"], shown["outcome"], shown["problem"]) == ("policy-7", "was killed by signal 9", "")
    assert "script" in [process["name"] for process in shown["processes"]]
    serving.send_signal(signal.SIGINT)
    assert serving.wait(PATIENCE_S) == 130
