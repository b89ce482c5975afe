"""The counters over HTTP: fetched while the store is at work, by clients of all manners."""

import asyncio
import socket
from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import torch

from skipper import torchstore as ts
from skipper.torchstore.support.exporter import CONTENT_TYPE, MetricsServer
from skipper.torchstore.support.metrics import log_of
from tests.prometheus import parse
from tests.torchstore.support.test_metrics import record

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
