"""The dashboard's pages of an actor and of output, and what runs too long, in a real browser."""

import dataclasses
import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from skipper.control import ActorError, ActorMesh, this_host
from skipper.control.observe import Activity, Dashboard, ProcessStacks, job_status, serve_dashboard
from skipper.control.observe.dashboard_lookups import DashboardLookups
from skipper.control.observe.errors import ProcessErrors
from skipper.control.observe.log_files import LogFiles
from skipper.control.observe.log_reader import LogSource
from skipper.control.runtime.history import ErrorGroup
from skipper.control.runtime.latencies import EndpointLatency
from tests.control.actors import Echo
from tests.control.conftest import PATIENCE_S, Failures
from tests.control.observe.browser import PATIENCE_MS, browsers, needs_chromium
from tests.control.observe.sources import SourceOf

SCRIPT = "<script>window.hacked = true</script><img src=x onerror='window.hacked = true'>"
RANK_1 = "echoes{'gpus': 1}"

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from browsers()


@contextmanager
def opened(context: BrowserContext, url: str) -> Iterator[Page]:
    """A page; nothing that the browser complains of is let pass."""
    complaints: list[str] = []
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    yield page
    assert not complaints
    assert page.evaluate("window.hacked") is None
    page.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(color_scheme="light") as context:
        yield context


@pytest.fixture
def page(context: BrowserContext, echoes: ActorMesh[Echo]) -> Iterator[Page]:
    with serve_dashboard(interval=0.2, timeout=5.0) as dashboard, opened(context, dashboard.url) as page:
        yield page


def fact(page: Page, name: str) -> Locator:
    """What the page of an actor says beside a name."""
    return page.locator(".facts div").filter(has=page.locator("dt", has_text=name)).locator("dd")


def open_actor(page: Page, label: str) -> None:
    page.locator("tr.actor a", has_text=label).click()
    expect(page.locator(".part-head h2")).to_contain_text(label)


@needs_chromium
def test_an_actor_has_a_page_of_what_it_does_and_how_long_that_takes(page: Page, blocked: ActorMesh[Echo]) -> None:
    waiting = [blocked.echo.call_one(1) for _ in range(3)]
    open_actor(page, RANK_1)
    expect(fact(page, "Now")).to_contain_text("busy run")
    expect(fact(page, "In its queue")).to_have_text("3")
    expect(page.locator(".tiles li[data-name=queued]:visible .tile-value")).to_have_text("3")
    page.locator("a", has_text="← all").click()
    open_actor(page, "echoes{'gpus': 0}")
    expect(fact(page, "Now")).to_have_text("idle")
    assert not any(future.done() for future in waiting)


@needs_chromium
def test_calls_that_have_ended_have_percentiles(page: Page, echoes: ActorMesh[Echo]) -> None:
    for _ in range(10):
        echoes.pid.call().get(PATIENCE_S)
    open_actor(page, RANK_1)
    cells = page.locator("tr[data-endpoint=pid] td")
    expect(cells).to_have_count(4)
    for place in range(1, 4):
        expect(cells.nth(place)).to_contain_text("s")


@needs_chromium
def test_errors_that_are_alike_are_counted_and_have_a_traceback(page: Page, echoes: ActorMesh[Echo]) -> None:
    for _ in range(3):
        with pytest.raises(ActorError):
            echoes.slice(gpus=1).fail.call_one(LookupError(SCRIPT)).get(PATIENCE_S)
    open_actor(page, RANK_1)
    group = page.locator(".groups li[data-error=LookupError]", has_text="window.hacked").first
    expect(group.locator(".times")).to_have_text("\u00d73")
    expect(group.locator(".event-message")).to_have_text(f"LookupError: {SCRIPT}")
    expect(group.locator("pre")).to_be_hidden()
    group.locator("summary").click()
    expect(group.locator("pre")).to_contain_text("raise error")
    expect(group.locator("summary")).to_contain_text("actors.py")


@needs_chromium
def test_the_overview_counts_errors_of_all_actors_by_kind(page: Page, echoes: ActorMesh[Echo]) -> None:
    for _ in range(2):
        with pytest.raises(ActorError):
            echoes.fail.call(OverflowError(SCRIPT)).get(PATIENCE_S)
    item = page.locator("#events li[data-error=OverflowError]")
    expect(item).to_have_count(1)
    expect(item.locator(".times")).to_have_text("\u00d74")
    expect(item.locator(".event-who")).to_contain_text("echoes{'gpus': 0}.fail")
    expect(item.locator(".event-who")).to_contain_text("echoes{'gpus': 1}.fail")
    item.locator("summary").click()
    expect(item.locator("pre")).to_contain_text("raise error")
    with pytest.raises(ActorError):
        echoes.slice(gpus=0).fail.call_one(OverflowError("another")).get(PATIENCE_S)
    expect(item.locator(".times")).to_have_text("\u00d75")
    expect(item.locator(".event-message")).to_have_text("OverflowError: another")
    expect(item.locator("pre")).to_be_visible()  # it stays open
    expect(page.locator("#events li[data-kind=error]", has_text="OverflowError")).to_have_count(1)


@needs_chromium
def test_from_the_symptom_of_a_hang_to_the_line_of_code_in_three_actions(
    context: BrowserContext, blocked: ActorMesh[Echo]
) -> None:
    with (
        serve_dashboard(interval=0.2, timeout=5.0, slow_after=0.2, hung_after=0.5) as dashboard,
        opened(context, dashboard.url) as page,
    ):
        expect(page.locator("#health")).to_have_text("1 call hangs?")
        assert "1 call hangs?" in page.title()
        expect(page.locator("#banner")).to_contain_text(f"{RANK_1} has been in run for")
        expect(page.locator("tr.actor", has_text=RANK_1).locator(".state")).to_contain_text("hangs?")
        page.locator("#banner a").click()
        page.get_by_role("button", name="Take stacks").click()
        stacks = page.get_by_label("Stacks").locator("pre")
        expect(stacks).to_contain_text("block_on")
        expect(stacks).to_contain_text("os.read(pipe, 100)")


@needs_chromium
def test_a_reader_chooses_other_bounds_for_themselves(context: BrowserContext, blocked: ActorMesh[Echo]) -> None:
    with serve_dashboard(interval=0.2, timeout=5.0) as dashboard, opened(context, dashboard.url) as page:
        state = page.locator("tr.actor", has_text=RANK_1).locator(".state")
        expect(state).to_contain_text("busy")
        expect(page.locator("#health")).to_have_text("healthy")
        assert page.locator("#hung-after").get_attribute("placeholder") == "120"
        page.locator("#slow-after").fill("0.1")
        page.locator("#slow-after").blur()
        expect(page.locator("#health")).to_have_text("1 call is slow")
        expect(state).to_have_attribute("data-level", "slow")
        page.reload()
        expect(page.locator("#health")).to_have_text("1 call is slow")
        page.locator("#slow-after").fill("")
        page.locator("#slow-after").blur()
        expect(page.locator("#health")).to_have_text("healthy")


@needs_chromium
def test_an_endpoint_that_usually_takes_long_gets_more_time(context: BrowserContext, echoes: ActorMesh[Echo]) -> None:
    status = job_status()
    worker = status.processes[-1]
    assert worker.report is not None
    (actor,) = worker.report.actors

    def at(seconds: float, usual_s: float) -> SourceOf:
        known = [EndpointLatency("step", 20, usual_s / 2, usual_s, usual_s)]
        busy = dataclasses.replace(actor, state="busy", doing=[Activity("step", seconds)], latencies=known)
        report = dataclasses.replace(worker.report, actors=[busy])  # type: ignore[type-var]
        return SourceOf(dataclasses.replace(status, processes=[dataclasses.replace(worker, report=report)]))

    for seconds, usual_s, word in (
        (500.0, 1.0, "1 call hangs?"),
        (500.0, 400.0, "healthy"),
        (900.0, 400.0, "1 call is slow"),
    ):
        with (
            Dashboard(at(seconds, usual_s), 0, "127.0.0.1", None, interval_s=0.2) as dashboard,
            opened(context, dashboard.url) as page,
        ):
            expect(page.locator("#health")).to_have_text(word)


@needs_chromium
def test_dark_and_light_follow_the_system_until_a_reader_chooses(browser: Browser, echoes: ActorMesh[Echo]) -> None:
    def background(page: Page) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    dark, light = "rgb(14, 18, 23)", "rgb(245, 246, 248)"
    with (
        serve_dashboard(interval=0.2) as dashboard,
        browser.new_context(color_scheme="dark") as context,
        opened(context, dashboard.url) as page,
    ):
        expect(page.locator("#theme")).to_have_text("Theme: system")
        assert background(page) == dark
        for theme, colour in (("dark", dark), ("light", light)):
            page.locator("#theme").click()
            expect(page.locator("#theme")).to_have_text(f"Theme: {theme}")
            assert background(page) == colour
        page.reload()
        expect(page.locator("#theme")).to_have_text("Theme: light")
        assert background(page) == light


@needs_chromium
def test_output_is_followed_and_chosen_by_mesh_and_rank(page: Page, echoes: ActorMesh[Echo]) -> None:
    def say(text: str) -> None:
        echoes.run.call(print, text, flush=True).get(PATIENCE_S)

    say(f"one {SCRIPT}")
    page.locator("nav a", has_text="Logs").click()
    lines = page.locator("#logs .line:visible")
    expect(lines.filter(has_text="one")).to_have_count(2)
    expect(lines.filter(has_text="one").first.locator(".said")).to_have_text(f"one {SCRIPT}")
    page.locator("#log-mesh").select_option("echoes")
    page.locator("#log-rank").select_option("gpus=1")
    expect(lines.filter(has_text="one")).to_have_count(1)
    assert "echoes%5Bgpus%3D1%5D" in page.url
    say("two")
    expect(lines.filter(has_text="two")).to_have_count(1)
    expect(lines.filter(has_text="two").locator(".label")).to_have_text("echoes gpus=1")
    page.locator("#log-words").fill("TWO")
    expect(lines.filter(has_text="one")).to_have_count(0)
    expect(lines.filter(has_text="two")).to_have_count(1)
    page.locator("#log-words").fill("")
    page.locator("#log-stream").select_option("stderr")
    expect(lines).to_have_count(0)


@needs_chromium
def test_an_actors_page_has_its_output(page: Page, echoes: ActorMesh[Echo]) -> None:
    echoes.slice(gpus=1).run.call_one(print, "\x1b[31mof rank 1\x1b[0m", flush=True).get(PATIENCE_S)
    open_actor(page, "echoes{'gpus': 0}")
    output = page.get_by_role("region", name="Output")
    expect(output).to_be_visible()
    open_page = page.locator("a", has_text="← all")
    open_page.click()
    open_actor(page, RANK_1)
    expect(output.locator(".line .said").last).to_have_text("of rank 1")


@needs_chromium
def test_a_process_page_tells_of_a_death_and_of_its_successor(page: Page, failures: Failures) -> None:
    procs = this_host().spawn_procs(name="mortal")
    pid = procs.spawn("mortal", Echo).pid.call_one().get(PATIENCE_S)
    page.locator("tr.process a", has_text="mortal").click()
    expect(fact(page, "pid")).to_have_text(str(pid))
    os.kill(pid, signal.SIGKILL)
    failures.wait()
    expect(page.locator(".part-head .state")).to_have_text("ended")
    expect(page.locator("section[aria-label='Deaths and restarts'] li")).to_contain_text("SIGKILL")
    next_pid = this_host().spawn_procs(name="mortal").spawn("mortal", Echo).pid.call_one().get(PATIENCE_S)
    page.locator("a", has_text="Another process of this name is running.").click()
    expect(fact(page, "pid")).to_have_text(str(next_pid))
    expect(fact(page, "Restarts")).to_have_text("1")


@needs_chromium
def test_a_chart_becomes_wide_and_has_axes(page: Page, echoes: ActorMesh[Echo]) -> None:
    tile = page.locator("li[data-name=memory]")
    expect(tile.locator(".axis")).to_be_hidden()
    narrow = tile.bounding_box()
    tile.locator(".tile-face").click()
    expect(tile.locator(".axis-top")).to_contain_text("iB")
    wide = tile.bounding_box()
    assert narrow is not None
    assert wide is not None
    assert wide["width"] > 2 * narrow["width"]
    tile.get_by_role("button", name="10 min").click()
    expect(tile.get_by_role("button", name="10 min")).to_have_attribute("aria-pressed", "true")
    box = tile.locator("svg").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 3, box["y"] + box["height"] / 2)
    expect(tile.locator(".reading")).to_contain_text("iB")


@needs_chromium
def test_a_job_that_is_recorded_is_shown_like_one_that_runs(
    context: BrowserContext, echoes: ActorMesh[Echo], tmp_path: Path
) -> None:
    status = job_status()
    worker = status.processes[-1]
    files = LogFiles(tmp_path, "ended")
    files.keep(LogSource(-1, 2, worker.name, worker.pid or 0, actors=("echoes",)), b"the last words\n")
    files.close()
    group = ErrorGroup(
        f"{RANK_1}.step", "KeyError", "train.py:7", 5, 1.0, 2.0, "KeyError: 'x'", "Traceback of train.py"
    )
    stacks = ProcessStacks(worker.name, worker.pid, (), (), "it had hung", "File train.py, line 7")
    source = SourceOf(status, [ProcessErrors(worker.id, [group])], [stacks], tmp_path)
    assert worker.report is not None
    with (
        Dashboard(source, 0, "127.0.0.1", None, interval_s=0.2) as dashboard,
        opened(context, dashboard.url) as page,
    ):
        expect(page.locator("#job")).to_contain_text("train · job ")
        page.locator("tr.process a", has_text=worker.name).click()
        expect(page.locator(".groups .times")).to_have_text("\u00d75")
        page.get_by_role("button", name="Take stacks").click()
        expect(page.locator("pre.stacks", has_text="line 7")).to_be_visible()
        expect(page.locator(".line .said")).to_have_text("the last words")


def ask(dashboard: Dashboard, path: str, **query: object) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=PATIENCE_S)
    try:
        connection.request("GET", f"{path}?{urlencode(query)}")
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_queries_that_the_page_never_sends_are_refused(echoes: ActorMesh[Echo]) -> None:
    with serve_dashboard() as dashboard:
        for path, query in (
            ("/logs.json", {"who": "x" * 501}),
            ("/logs.json", {"after": "-1", "reader": ask(dashboard, "/logs.json", who="nobody")[1]["reader"]}),
            ("/stacks.json", {"name": "workers", "pid": "1e3"}),
            ("/stacks.json", {"name": "workers", "pid": "9" * 20}),
        ):
            status, said = ask(dashboard, path, **({"who": "nobody"} | query))
            assert (status, bool(said["problem"])) == (400, True), query
        assert ask(dashboard, "/errors.json", process="no such")[1] == {"problem": "", "groups": []}
        assert "no longer exists" in str(ask(dashboard, "/stacks.json", name="workers", pid="1")[1]["problem"])


def test_stacks_are_taken_for_one_reader_at_a_time(echoes: ActorMesh[Echo]) -> None:
    status = job_status()
    entered, go_on = threading.Event(), threading.Event()

    class Slow(SourceOf):
        def stacks(self) -> list[ProcessStacks]:
            entered.set()
            assert go_on.wait(PATIENCE_S)
            return [ProcessStacks("script", 7, (), (), "", "here")]

    lookups = DashboardLookups(Slow(status))
    answers: list[str] = []
    query = {"name": "script", "pid": "7"}
    first = threading.Thread(target=lambda: answers.append(lookups.answer("/stacks.json", query).body))
    first.start()
    assert entered.wait(PATIENCE_S)
    assert json.loads(lookups.answer("/stacks.json", query).body) == {"problem": "", "busy": True}
    go_on.set()
    first.join()
    assert "here" in json.loads(answers[0])["text"]


def test_what_a_source_cannot_tell_is_said_in_words(echoes: ActorMesh[Echo]) -> None:
    with Dashboard(SourceOf(job_status()), 0, "127.0.0.1", None) as dashboard:
        assert ask(dashboard, "/logs.json") == (200, {"problem": "nobody has written anything"})
