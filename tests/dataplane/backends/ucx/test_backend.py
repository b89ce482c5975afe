"""What only UCX has to get right: threads that sleep, sockets that close, batches larger than its window."""

import gc
import itertools
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from skipper.dataplane import OwnerDiedError, RDMAAction, RDMABuffer, RemoteLayout
from skipper.dataplane.backends.ucx.engine import may_listen, options
from skipper.dataplane.backends.ucx.peer import UcxPeer
from skipper.dataplane.config import Config
from tests.conformance.owner import RemoteOwner, footprint
from tests.dataplane.scripts import run
from tests.reach import needs_filters

_UCX = (1, 22, 0)
TCP = {"backend": "ucx", "ucx": {"TLS": "tcp,self"}}


@pytest.fixture(params=["cma", *(pytest.param(way, marks=needs_filters) for way in ("tcp", "far"))])
def owner(request: pytest.FixtureRequest) -> Iterator[RemoteOwner]:
    started = RemoteOwner({} if request.param == "cma" else TCP, shared=False, far=request.param == "far")
    yield started
    started.close()


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_thousands_of_segments_in_one_action(owner: RemoteOwner) -> None:
    count = 3000
    name, raw = owner("make_filled", count * 64, 5)
    into = np.zeros((count, 32), np.uint8)
    layout = RemoteLayout(0, (count, 32), (64, 1), 1)
    buffer = RDMABuffer.deserialize(raw)
    action = RDMAAction().read_remote(into, buffer, layout=layout)
    action.submit().get()
    assert action.segments == count
    assert (into == 5).all()
    RDMAAction().write_remote(buffer, into * 2, layout=layout).submit().get()
    after = np.frombuffer(owner("content", name), np.uint8).reshape(count, 64)
    assert (after[:, :32] == 10).all()
    assert (after[:, 32:] == 5).all()


def test_a_short_action_goes_on_over_a_new_connection(owner: RemoteOwner) -> None:
    _, raw = owner("make_filled", 1000, 5)
    buffer, into = RDMABuffer.deserialize(raw), np.zeros(1000, np.uint8)
    action = RDMAAction().read_remote(into, buffer)
    peer, remote, _ = buffer.route()
    assert isinstance(peer, UcxPeer)
    for _ in range(3):
        into[:] = 0
        action.submit().get()
        assert (into == 5).all()
        _, (endpoint, *_) = peer.connections.connected(0, remote.key, time.monotonic() + 10)
        peer.connections.cut(endpoint)


def test_transfers_larger_than_a_piece_and_a_turn(owner: RemoteOwner) -> None:
    nbytes = (80 << 20) + 1
    _, raw = owner("make_filled", nbytes, 3)
    into = np.zeros(nbytes, np.uint8)
    RDMABuffer.deserialize(raw).read_into(into).get()
    assert (into == 3).all()


def test_every_thread_gets_the_answer_to_its_own_atomic_operation(owner: RemoteOwner) -> None:
    name, raw = owner("make", bytes(8))
    buffer = RDMABuffer.deserialize(raw)
    threads, each = 8, 100

    def add(_: int) -> list[int]:
        return [buffer.fetch_add(1, timeout=20).get() for _ in range(each)]

    with ThreadPoolExecutor(threads) as pool:
        seen = list(pool.map(add, range(threads)))
    assert all(previous == sorted(previous) for previous in seen)
    assert sorted(itertools.chain(*seen)) == list(range(threads * each))
    assert int.from_bytes(owner("content", name), sys.byteorder) == threads * each


def test_nobody_spins_while_nothing_happens(owner: RemoteOwner) -> None:
    _, raw = owner("make", bytes(100))
    buffer = RDMABuffer.deserialize(raw)
    buffer.read_into(bytearray(100)).get()
    pids = (owner.process.pid, os.getpid())
    before = [cpu_ticks(pid) for pid in pids]
    assert not owner._connection.poll(0.5)  # half a second, in which a spinning thread would take 50 ticks
    assert all(cpu_ticks(pid) - was < 10 for pid, was in zip(pids, before, strict=True))


@needs_filters
def test_trying_a_dead_owner_again_and_again_leaves_no_socket() -> None:
    owner = RemoteOwner(TCP, shared=False, far=True)
    _, raw = owner("make", bytes(100))
    buffer = RDMABuffer.deserialize(raw)
    buffer.read_into(bytearray(100)).get()
    owner.close()

    def attempt() -> None:
        with pytest.raises(OwnerDiedError):
            buffer.read_into(bytearray(100), timeout=10).get()

    attempt()
    gc.collect()
    before, _ = footprint()
    for _ in range(30):
        attempt()
    assert footprint()[0] <= before + 3


def test_no_name_of_shared_memory_is_left_in_the_file_system(owner: RemoteOwner) -> None:
    _, raw = owner("make", bytes(100))
    RDMABuffer.deserialize(raw).read_into(bytearray(100)).get()
    owner.close()
    first, second = os.listdir("/dev/shm"), os.listdir("/dev/shm")  # a process that just starts has one for a moment
    assert not [name for name in first if name in second and "ucx" in name]


def test_options_are_ours_below_the_environment_and_the_callers_above_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert options(Config(), _UCX)["NET_DEVICES"] == "lo"
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    assert "NET_DEVICES" not in options(Config(), _UCX)
    chosen = options(Config(ucx={"NET_DEVICES": "eth1", "RNDV_THRESH": "1k"}), _UCX)
    assert (chosen["NET_DEVICES"], chosen["RNDV_THRESH"]) == ("eth1", "1k")


def test_tcp_is_there_only_where_a_network_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert options(Config(), _UCX)["TLS"] == "^sysv,tcp"
    assert options(Config(ucx={"NET_DEVICES": "lo"}), _UCX)["TLS"] == "^sysv"
    assert options(Config(ucx={"TLS": "tcp,self"}), _UCX)["TLS"] == "tcp,self"
    assert options(Config(), (1, 13, 1))["TLS"] == "^sysv"  # it needs TCP to tell of failures
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    assert options(Config(), _UCX)["TLS"] == "^sysv"


@pytest.mark.parametrize(
    ("named", "listens"),
    [
        ("^sysv,tcp", False),
        ("^tcp", False),
        ("^sysv", True),
        ("posix,self", False),
        ("shm,self,cuda", False),
        ("tcp,self", True),
        ("self,\\tcp", True),
        ("self,tcp:aux", True),
        ("t*", True),
        ("all", True),
    ],
)
def test_a_port_is_guarded_wherever_the_named_transports_may_open_one(
    monkeypatch: pytest.MonkeyPatch, named: str, listens: bool
) -> None:
    assert may_listen({"TLS": named}) == listens
    monkeypatch.setenv("UCX_TLS", named)
    assert may_listen({}) == listens
    monkeypatch.delenv("UCX_TLS")
    assert may_listen({})  # all of them


@pytest.mark.parametrize("named", ["posix,self", "^tcp"])
def test_no_port_is_open_where_it_is_said_that_none_may_be(named: str) -> None:
    out = run(
        "from skipper import dataplane\n"
        f"dataplane.configure(ucx={{'TLS': {named!r}, 'NET_DEVICES': 'lo'}}, backend='ucx')\n"
        "buffer = dataplane.RDMABuffer(bytearray(9))\n"
        "buffer.serialize()\n"
        "from skipper.trust import own_sockets\n"
        "print(own_sockets.listening({}))\n"
    )
    assert out == "{}\n"


def test_a_library_that_aborts_on_closing_while_it_connects_gets_no_keepalive() -> None:
    assert options(Config(), (1, 13, 1))["KEEPALIVE_INTERVAL"] == "inf"
    assert "KEEPALIVE_INTERVAL" not in options(Config(), _UCX)
    assert options(Config(ucx={"KEEPALIVE_INTERVAL": "20s"}), (1, 13, 1))["KEEPALIVE_INTERVAL"] == "20s"
