"""What an owner does with messages: it touches what it has exported, for as long as it is there, and nothing else."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from skipper import dataplane
from skipper.dataplane import (
    BufferDroppedError,
    RDMAAction,
    RDMABuffer,
    RemoteLayout,
    TransferError,
    TransferTimeoutError,
)
from skipper.dataplane.backends.ucx.connections import AbandonedConnections
from skipper.dataplane.backends.ucx.peer import UcxPeer
from skipper.dataplane.operation import Operation
from tests.conformance.loops import meanwhile, write_until_it_fails
from tests.conformance.owner import RemoteOwner
from tests.handles import parsed, proved_handle
from tests.sameness import assert_same

TCP = {"backend": "ucx", "ucx": {"TLS": "tcp,self"}}
CONTENT = bytes(range(256)) * 16
Attempt = Callable[[], Operation]


@pytest.fixture(scope="module", params=["tcp", "far"])
def owner(request: pytest.FixtureRequest) -> Iterator[RemoteOwner]:
    started = RemoteOwner(TCP, shared=False, far=request.param == "far")
    yield started
    started.close()


@pytest.fixture(scope="module")
def cma_owner() -> Iterator[RemoteOwner]:
    started = RemoteOwner({}, shared=False)
    yield started
    started.close()


def forged(raw: bytes, **changes: Any) -> RDMABuffer:
    """The buffer that a handle with other words in it gives."""
    handle, _, _ = parsed(raw)
    other = dataclasses.replace(handle, **changes)
    return RDMABuffer.deserialize(proved_handle(other, 0, other.total))


def base_of(raw: bytes) -> int:
    return parsed(raw)[0].base


def peer_of(buffer: RDMABuffer) -> UcxPeer:
    handle, _, _ = parsed(buffer.serialize())
    peer = dataplane.process.current().selector.route(handle)[0]  # the one that the buffer uses
    assert isinstance(peer, UcxPeer)
    return peer


@pytest.mark.parametrize("shift", [-8, 8, 1 << 40])
def test_stretches_that_no_buffer_has_are_refused_and_the_owner_goes_on(owner: RemoteOwner, shift: int) -> None:
    name, raw = owner("make", CONTENT)
    beside = forged(raw, base=base_of(raw) + shift)
    attempts: tuple[Attempt, ...] = (
        lambda: beside.read_into(bytearray(len(CONTENT)), timeout=10),
        lambda: beside.write_from(bytes(len(CONTENT)), timeout=10),
        lambda: beside.fetch_add(1, offset=0 if shift < 0 else len(CONTENT) - 8, timeout=10),
    )
    for attempt in attempts:
        with pytest.raises(TransferError, match="refused"):
            attempt().get()
    assert_same(owner("content", name), CONTENT)


def test_atomic_operations_are_refused_the_same_way_within_a_host(cma_owner: RemoteOwner) -> None:
    name, raw = cma_owner("make", CONTENT)
    with pytest.raises(TransferError, match="refused"):
        forged(raw, base=base_of(raw) - 8).fetch_add(1, timeout=10).get()
    with pytest.raises(BufferDroppedError):
        forged(raw, slot=100_000).fetch_add(1, timeout=10).get()
    assert_same(cma_owner("content", name), CONTENT)


def test_what_was_registered_for_reading_is_not_written(owner: RemoteOwner) -> None:
    name, raw = owner("make", CONTENT, False)
    writable = forged(raw, writable=True)
    with pytest.raises(TransferError, match="refused"):
        writable.write_from(bytes(len(CONTENT)), timeout=10).get()
    with pytest.raises(TransferError, match="refused"):
        writable.compare_and_swap(0, 1, timeout=10).get()
    assert_same(owner("content", name), CONTENT)


def test_a_word_that_belongs_to_no_buffer_is_that_of_a_dropped_one(owner: RemoteOwner) -> None:
    _, raw = owner("make", CONTENT)
    with pytest.raises(BufferDroppedError):
        forged(raw, slot=100_000).read_into(bytearray(len(CONTENT)), timeout=10).get()


@pytest.mark.parametrize("to_remote", [False, True], ids=["read", "write"])
def test_a_batch_says_which_of_its_buffers_was_dropped(owner: RemoteOwner, to_remote: bool) -> None:
    made = [owner("make_filled", 3000, value) for value in range(5)]
    buffers = [RDMABuffer.deserialize(raw) for _, raw in made]
    local = np.zeros((5, 3000), np.uint8)
    action = RDMAAction()
    for buffer, row in zip(buffers, local, strict=True):
        action = action.write_remote(buffer, row) if to_remote else action.read_remote(row, buffer)
    action.submit(timeout=10).get()
    owner("drop", made[3][0])
    slot = parsed(made[3][1])[0].slot
    with pytest.raises(BufferDroppedError, match=rf"\b{slot}\b"):
        action.submit(timeout=10).get()


def test_runs_of_any_length_come_in_their_places_both_ways(owner: RemoteOwner) -> None:
    shape, strides = (70, 3, 5000), (3 * 5013, 5013, 1)
    content = np.random.default_rng(3).integers(0, 256, shape[0] * strides[0], dtype=np.uint8)
    name, raw = owner("make", content.tobytes())
    buffer = RDMABuffer.deserialize(raw)
    there = np.lib.stride_tricks.as_strided(content[13:], shape, strides)
    for run in (1, 63, 4999):
        layout = RemoteLayout(13, (*shape[:2], run), strides, 1)
        into = np.zeros((*shape[:2], run), np.uint8)
        RDMAAction().read_remote(into, buffer, layout=layout).submit(timeout=10).get()
        assert (into == there[..., :run]).all()
        RDMAAction().write_remote(buffer, ~into, layout=layout).submit(timeout=10).get()
        there[..., :run] = ~into
        assert_same(owner("content", name), content.tobytes())


def test_no_byte_of_a_write_lands_after_the_drop(owner: RemoteOwner) -> None:
    nbytes = 8 << 20
    source = np.full(nbytes, 3, np.uint8)
    for _ in range(3):
        name, raw = owner("make_filled", nbytes, 1)
        buffer = RDMABuffer.deserialize(raw)
        buffer.write_from(source).get()
        with meanwhile(functools.partial(owner, "drop_and_fill", name, 2)), pytest.raises(BufferDroppedError):
            write_until_it_fails(buffer, source)
        assert (np.frombuffer(owner("content", name), np.uint8) == 2).all()


def test_what_comes_late_over_a_connection_that_was_given_up_is_ignored(owner: RemoteOwner) -> None:
    name, raw = owner("make", CONTENT)
    buffer = RDMABuffer.deserialize(raw)
    attempts: tuple[Attempt, ...] = (
        lambda: buffer.write_from(bytes(len(CONTENT)), timeout=0.2),
        lambda: buffer.fetch_add(1, timeout=0.2),
    )
    for attempt in attempts:
        buffer.read_into(bytearray(len(CONTENT)), timeout=10).get()
        _, (endpoint, *_) = peer_of(buffer).connections.connected(0, buffer.route()[1].key, time.monotonic() + 10)
        endpoint.forget([endpoint.number])  # as the next connection would, with messages of this one under way
        with pytest.raises(TransferTimeoutError):
            attempt().get()
    assert_same(owner("content", name), CONTENT)
    buffer.write_from(CONTENT[::-1], timeout=10).get()
    assert_same(owner("content", name), CONTENT[::-1])


def test_connections_that_were_given_up_are_counted_once_and_the_last_ones_kept() -> None:
    abandoned = AbandonedConnections()
    for number in (1, 2, 2, 1):
        abandoned.note(number)
    assert abandoned.last() == (2, [1, 2])
    for number in range(1000):
        abandoned.note(number + 10)
    count, last = abandoned.last()
    assert (count, abandoned.count, last[-1]) == (1002, 1002, 1009)
    assert len(last) < 100
