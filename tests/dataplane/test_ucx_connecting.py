"""Connections over TCP that are made anew: after a failure half-way, and again and again."""

import gc
import os
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from dataplane import RDMABuffer, TransferTimeoutError
from dataplane.backends.ucx_admission import Admission
from dataplane.backends.ucx_peer import UcxPeer
from tests.conformance.owner import RemoteOwner

NBYTES = 100_000


@pytest.fixture
def owner() -> Iterator[RemoteOwner]:
    started = RemoteOwner({"backend": "ucx", "ucx": {"TLS": "tcp,self"}}, shared=False)
    yield started
    started.close()


def reads_its_content(buffer: RDMABuffer, timeout: float = 20) -> bool:
    into = np.zeros(NBYTES, np.uint8)
    buffer.read_into(into, timeout=timeout).get()
    return bool((into == 7).all())


def test_a_connection_given_up_while_it_was_made_does_not_stand_in_the_way_of_the_next(
    owner: RemoteOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, raw = owner("make_filled", NBYTES, 7)
    buffer = RDMABuffer.deserialize(raw)

    def too_late(self: Admission) -> None:
        raise TransferTimeoutError("the deadline passed")

    with monkeypatch.context() as patch:
        patch.setattr(Admission, "connected", too_late)
        for _ in range(3):
            with pytest.raises(TransferTimeoutError):
                reads_its_content(buffer)
    assert reads_its_content(buffer)


def test_an_owner_that_does_not_answer_is_not_waited_for_beyond_the_deadline(owner: RemoteOwner) -> None:
    _, raw = owner("make_filled", NBYTES, 7)
    buffer = RDMABuffer.deserialize(raw)
    os.kill(owner.process.pid, signal.SIGSTOP)
    with pytest.raises(TransferTimeoutError):
        reads_its_content(buffer, timeout=0.3)
    os.kill(owner.process.pid, signal.SIGCONT)
    assert reads_its_content(buffer)


def test_connections_that_are_made_anew_leave_nothing(owner: RemoteOwner) -> None:
    _, raw = owner("make_filled", NBYTES, 7)
    buffer = RDMABuffer.deserialize(raw)
    peer, _, _ = buffer.route()
    assert isinstance(peer, UcxPeer)

    def again(times: int) -> tuple[int, int]:
        for _ in range(times):
            assert reads_its_content(buffer)
            peer.close()
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    descriptors, threads = again(3)
    there, _, _ = owner("footprint")
    now = again(10)
    assert now[0] <= descriptors + 5  # the last one may not have ended yet
    assert now[1] <= threads + 1
    assert owner("footprint")[0] <= there + 3
