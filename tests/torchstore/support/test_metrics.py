"""Records of what was done, and the text that Prometheus reads, also over HTTP while the store is at work."""

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import torch

from skipper import torchstore as ts
from skipper.control.runtime.status_providers import occurrences_since
from skipper.control.support.exposition import CONTENT_TYPE
from skipper.torchstore.support.metrics import BUCKETS_S, KEPT_RECORDS, MetricsServer, SyncLog, log_of
from skipper.torchstore.support.records import STAGES, Cost, SyncRecord
from tests.prometheus import parse


def record(**fields: Any) -> SyncRecord:
    made = Cost("get", 0.0).record("k", 1, 2)
    return SyncRecord(**{name: fields.get(name, getattr(made, name)) for name in SyncRecord.__dataclass_fields__})


@pytest.mark.usefixtures("store")
async def test_a_sync_leaves_a_record_of_its_stages_and_adds_to_the_counters() -> None:
    before = parse(ts.metrics_text("default")) if ts.sync_history() else {}
    labels = 'store="default",op="get",mode="direct"'

    def grown(name: str, more: str = "") -> float:
        now = parse(ts.metrics_text("default"))
        return now[name][labels + more] - before.get(name, {}).get(labels + more, 0)

    model = {"w": torch.randn(300, 300)}
    mine = {"w": torch.zeros(300, 300)}
    for _ in range(3):
        await ts.put_state_dict(model, "s", mode="direct")
        await ts.get_state_dict("s", mine)
    done = ts.sync_history()[-1]
    assert done == ts.last_sync()
    assert (done.op, done.key, done.version, done.mode, done.plan_hit) == ("get", "s", 3, "direct", True)
    assert set(done.stages) == set(STAGES)
    assert min(done.transfer_s, done.verify_s, done.describe_s, done.control_s) > 0
    assert (done.compile_s, done.cast_s) == (0, 0)
    assert 0 < sum(done.stages.values()) <= done.seconds
    assert grown("torchstore_sync_bytes_total") == 3 * 360_000
    assert grown("torchstore_sync_duration_seconds_count") == 3
    assert grown("torchstore_sync_duration_seconds_bucket", ',le="+Inf"') == 3
    assert grown("torchstore_plans_total", ',result="hit"') == 2
    assert grown("torchstore_plans_total", ',result="compiled"') == 1
    assert grown("torchstore_sync_stage_seconds_total", ',stage="transfer"') > 0
    assert parse(ts.metrics_text())["torchstore_version"]['store="default",op="get",key="s"'] == 3


@pytest.mark.usefixtures("store")
async def test_the_record_of_a_run_is_told_of_each_sync_once_and_of_no_small_value() -> None:
    began_s = time.time()
    await ts.put_state_dict({"w": torch.randn(300, 300)}, "s")
    await ts.put("small", 1)
    sync = ts.sync_history()[-2]
    (told,) = occurrences_since(began_s)["torchstore"]
    assert (told.at_s, told.what) == (sync.ended, f"put s version {sync.version}")
    assert (told.figures["store"], told.figures["nbytes"]) == ("default", 360_000)
    assert {f"{stage}_s" for stage in STAGES} <= set(told.figures)
    assert "torchstore" not in occurrences_since(time.time() + 1)


@pytest.mark.usefixtures("store")
async def test_a_cast_and_small_values_are_told_apart() -> None:
    await ts.put_state_dict({"w": torch.randn(300, 300)}, "s", transfer_dtype=torch.bfloat16)
    cast = ts.last_sync()
    assert cast is not None
    assert cast.cast_s > 0
    await ts.put("small", 1)
    assert await ts.get("small") == 1
    put, got = ts.sync_history()[-2:]
    assert [(put.op, put.mode), (got.op, got.mode)] == [("put", "inline"), ("get", "inline")]
    counted = parse(ts.metrics_text())
    assert counted["torchstore_control_messages_total"]['store="default",op="get",mode="inline"'] >= 1
    assert not any('key="small"' in labels for labels in counted.get("torchstore_version", {}))


@pytest.mark.usefixtures("store")
async def test_a_failed_get_is_counted_by_its_error() -> None:
    labels = 'store="default",op="get",error="KeyNotFoundError"'
    before = parse(ts.metrics_text()).get("torchstore_errors_total", {}).get(labels, 0)
    records = len(ts.sync_history())
    with pytest.raises(ts.KeyNotFoundError):
        await ts.get("nothing")
    assert parse(ts.metrics_text())["torchstore_errors_total"][labels] == before + 1
    assert len(ts.sync_history()) == records


@pytest.mark.usefixtures("store")
async def test_a_record_says_how_long_the_reader_waited_for_the_version() -> None:
    state = {"w": torch.ones(100, 100)}
    await ts.put_state_dict(state, "s")
    at_once = await ts.get_state_dict("s", version=1)
    waiting = asyncio.create_task(ts.get_state_dict("s", version=("newer_than", 1), timeout=60))
    await ts.exists("s")  # the wait has reached the controller before what we send next
    await ts.put_state_dict(state, "s")
    assert torch.equal((await waiting)["w"], at_once["w"])
    *_, first, second = (record for record in ts.sync_history() if record.op == "get")
    assert (first.version, second.version) == (1, 2)
    assert first.wait_s < second.wait_s <= second.control_s <= second.seconds


def test_stores_are_counted_apart_and_shown_together() -> None:
    log_of("counted-1").add(record(nbytes=5, mode="direct"))
    log_of("counted-2").add(record(nbytes=7, mode="direct"))
    both = parse(ts.metrics_text())["torchstore_sync_bytes_total"]
    assert both['store="counted-1",op="get",mode="direct"'] == 5
    assert both['store="counted-2",op="get",mode="direct"'] == 7
    assert list(parse(ts.metrics_text("counted-2"))["torchstore_sync_bytes_total"].values()) == [7]
    assert ts.metrics_text("never used") == ""


def test_the_history_is_bounded_and_the_counters_go_on() -> None:
    log = SyncLog()
    for number in range(KEPT_RECORDS + 10):
        log.add(record(version=number))
    kept = log.records()
    assert [kept[0].version, kept[-1].version, len(kept)] == [10, KEPT_RECORDS + 9, KEPT_RECORDS]
    counts = {name: value for name, _, value in log.samples("s") if name.endswith("_count")}
    assert counts == {"torchstore_sync_duration_seconds_count": KEPT_RECORDS + 10}


@pytest.mark.parametrize(("seconds", "first"), [(0.0, 0), (1e-4, 0), (2e-4, 1), (100.0, 12), (101.0, 13)])
def test_a_duration_falls_into_every_bucket_from_its_own_on(seconds: float, first: int) -> None:
    log = SyncLog()
    log.add(record(seconds=seconds))
    counts = [value for name, _, value in log.samples("s") if name.endswith("_bucket")]
    assert counts == [0] * first + [1] * (len(BUCKETS_S) + 1 - first)


def test_labels_are_escaped() -> None:
    log_of('a"b\\c\nd').add(record())
    text = ts.metrics_text('a"b\\c\nd')
    assert parse(text)
    assert r'store="a\"b\\c\nd"' in text


LIMIT_S = 20.0


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with ts.serve_metrics() as server:
        yield server


def fetch(url: str) -> dict[str, dict[str, float]]:
    with urlopen(url, timeout=LIMIT_S) as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        return parse(answer.read().decode())


@pytest.mark.usefixtures("store")
async def test_the_counters_are_fetched_while_a_sync_goes_on(server: MetricsServer) -> None:
    labels = 'store="default",op="get",mode="snapshot"'
    state = {"w": torch.ones(300, 300)}
    mine = {"w": torch.zeros(300, 300)}
    await ts.put_state_dict(state, "e")
    await ts.get_state_dict("e", mine)
    reading = asyncio.create_task(ts.get_state_dict("e", mine, version=("newer_than", 1), timeout=60))
    await ts.exists("e")  # the read has reached the controller before what we send next
    before = await asyncio.to_thread(fetch, server.url)
    assert not reading.done()
    await ts.put_state_dict(state, "e")
    await reading
    after = await asyncio.to_thread(fetch, server.url)
    moved = [figures["torchstore_sync_bytes_total"][labels] for figures in (before, after)]
    assert moved[1] - moved[0] == 360_000
    assert after["torchstore_version"]['store="default",op="get",key="e"'] == 2


def test_one_store_can_be_served_alone() -> None:
    for name, nbytes in (("served-1", 3), ("served-2", 4)):
        log_of(name).add(record(nbytes=nbytes, mode="direct"))
    with ts.serve_metrics(store_name="served-2") as server:
        assert list(fetch(server.url)["torchstore_sync_bytes_total"].values()) == [4]


def test_only_this_host_is_served_and_only_the_counters(server: MetricsServer) -> None:
    assert (server.host, server.url) == ("127.0.0.1", f"http://127.0.0.1:{server.port}/metrics")
    with pytest.raises(HTTPError, match="404") as caught:
        urlopen(server.url.replace("/metrics", "/"), timeout=LIMIT_S)
    caught.value.close()
    assert fetch(f"{server.url}?name=anything") is not None


def test_a_client_that_says_nothing_keeps_nobody_waiting(server: MetricsServer) -> None:
    with socket.create_connection((server.host, server.port), timeout=LIMIT_S):
        assert fetch(server.url) is not None


def test_a_client_that_goes_away_is_no_error(server: MetricsServer, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        with socket.create_connection((server.host, server.port), timeout=LIMIT_S) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # leave with a reset
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    assert fetch(server.url) is not None
    assert capfd.readouterr().err == ""


def test_a_closed_server_gives_its_port_back() -> None:
    server = ts.serve_metrics()
    with pytest.raises(OSError, match="in use"):
        ts.serve_metrics(server.port)
    server.close()
    server.close()
    with ts.serve_metrics(server.port) as again:
        assert again.port == server.port
