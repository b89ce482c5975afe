"""The tables that a store and its users report, as data and on the page of the dashboard."""

import asyncio
import time

import torch
from playwright.async_api import async_playwright, expect

from skipper import torchstore as ts
from skipper.control.observe import serve_dashboard
from skipper.control.observe.job_query import survey
from skipper.control.observe.status import status_of
from skipper.control.runtime import current_runtime
from skipper.control.runtime.status_providers import MAX_ROWS, Table
from skipper.torchstore.algebra.manifest import MeshPosition
from skipper.torchstore.controller.index import Index
from skipper.torchstore.controller.meta import overview
from skipper.torchstore.controller.version import Contribution
from skipper.torchstore.protocol.origin import Origin, Turn
from skipper.torchstore.support.process import ProcessId
from tests.control.observe.browser import PATIENCE_MS, launch_options, needs_chromium

HERE = ProcessId("here", 1, 1)


def reported(title: str = "Store default") -> list[Table]:
    """The tables of this title that the processes of this job report."""
    status = status_of(survey(current_runtime.current(), "status", True, timeout=20))
    tables = [table for process in status.processes if process.report is not None for table in process.report.tables]
    return [table for table in tables if table.title == title]


async def test_a_store_reports_its_keys_and_versions_until_it_is_shut_down() -> None:
    await ts.initialize()
    try:
        for number in range(2):
            await ts.put("weights", torch.full((64, 64), float(number)))
        await ts.put("step", 7)
        (table,) = reported()
        assert table.columns == ("key", "versions", "in the making", "retired, still read", "readers")
        assert [row[:3] for row in table.rows] == [("step", "1", None), ("weights", "2", None)]
    finally:
        await ts.shutdown()
    assert reported() == []


def test_what_is_read_lost_or_in_the_making_is_told() -> None:
    index = Index(lambda process, binding: None, lambda memory, spoilt: None, lambda history: None)
    for _ in range(12):
        index.contribute("inline", Contribution(HERE, MeshPosition(), None, None, inline=b"x"), None, keep=10)
    history = index.get("inline")
    assert history is not None
    history.lease(history.ready[12], HERE)
    history.ready[11].closed = True
    history.draining.append(history.ready.pop(3))
    half, turn = MeshPosition((0,), (2,), (0,)), Turn(Origin("", 0, 2), "a session", 1)
    index.contribute("whole/model", Contribution(HERE, half, None, None, turn=turn), None)
    table = overview("main", index)
    assert table.title == "Store main"
    assert table.rows == [
        ("inline", "1 older, 5, 6, 7, 8, 9, 10, 11 (taken back), 12", None, 1, 1),
        ("whole/model", None, "1", 0, 0),
    ]


async def test_who_waits_for_a_version_is_told_until_it_is_there(store: None) -> None:
    title = "Store default: who waits"
    weights = {"weight": torch.zeros(64)}
    await ts.put_state_dict(weights, "policy")
    assert reported(title) == []
    waiting = asyncio.create_task(ts.get_state_dict("policy", weights, version=("newer_than", 1)))
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not (tables := reported(title)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    ((process, why, seconds),) = tables[0].rows
    assert (process, tables[0].columns) == ("script", ("process", "why", "seconds"))
    assert "'policy'" in str(why)
    assert isinstance(seconds, float)
    await ts.put_state_dict({"weight": torch.ones(64)}, "policy")
    await waiting
    assert reported(title) == []


async def test_the_stages_of_puts_and_gets_add_up_and_begin_when_they_began(store: None) -> None:
    began = time.time()
    for number in range(20):
        await ts.put_state_dict({"weight": torch.full((64, 64), float(number))}, "policy")
    await ts.get_state_dict("policy", {"weight": torch.zeros(64, 64)})
    ended = time.time()
    (table,) = reported("Syncs")
    assert table.waterfall is not None
    every = [dict(zip(table.columns, row, strict=True)) for row in table.rows]  # also of stores of other tests
    rows = [row for row in every if row["version"].startswith("default ")]
    assert [row["what"] for row in rows] == [*["put"] * 15, "get"]
    assert rows[-1]["version"] == rows[-2]["version"] == "default policy v20"
    for row in rows:
        spent = sum(row[stage] for stage in table.waterfall.stages)
        assert began - 0.1 <= row["began"] <= row["began"] + spent <= ended + 0.1


def test_of_many_keys_the_latest_are_listed() -> None:
    index = Index(lambda process, binding: None, lambda memory, spoilt: None, lambda history: None)
    for number in range(MAX_ROWS + 3):
        index.contribute(f"key {number}", Contribution(HERE, MeshPosition(), None, None, inline=b"x"), None)
    table = overview("main", index)
    assert (len(table.rows), table.left_out) == (MAX_ROWS, 3)
    assert table.rows[0][0] == f"key {MAX_ROWS + 2}"


@needs_chromium
async def test_a_new_version_appears_on_the_page(store: None) -> None:
    await ts.put("policy/weights", torch.zeros(64, 64))
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(**launch_options())
        try:
            with serve_dashboard(interval=0.2) as dashboard:
                page = await browser.new_page()
                await page.goto(dashboard.url)
                row = page.locator(".tables tr", has_text="policy/weights")
                await expect(row.locator("td").nth(1)).to_have_text("1", timeout=PATIENCE_MS)
                await ts.put("policy/weights", torch.ones(64, 64))
                await expect(row.locator("td").nth(1)).to_have_text("2", timeout=PATIENCE_MS)
                await ts.get("policy/weights", torch.zeros(64, 64))
                syncs = page.get_by_role("region", name="Syncs")
                bars = syncs.locator(".bars li")
                await expect(bars).to_have_count(2, timeout=PATIENCE_MS)
                await expect(bars.first.locator(".bar-name")).to_contain_text("script · put", timeout=PATIENCE_MS)
                await expect(bars.nth(1).locator(".bar-name")).to_contain_text("script · get", timeout=PATIENCE_MS)
                assert await bars.nth(1).locator(".track .stage").count() >= 2
                await syncs.locator("select").select_option("default policy/weights v1")
                await expect(bars).to_have_count(1, timeout=PATIENCE_MS)
        finally:
            await browser.close()
