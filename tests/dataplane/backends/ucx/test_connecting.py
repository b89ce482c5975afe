"""Connections over TCP that are made anew: after a failure half-way, and again and again."""

import dataclasses
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from skipper import trust
from skipper.dataplane import RDMABuffer, TransferError, TransferTimeoutError, process
from skipper.dataplane.backends.ucx.admission import Admission, Contact
from skipper.dataplane.backends.ucx.card import UcxCard
from skipper.dataplane.backends.ucx.peer import UcxPeer
from skipper.dataplane.keys import Keys
from skipper.trust.own_sockets import SocketPlace
from tests.conformance.owner import Memory, RemoteOwner, main
from tests.freezing import freeze
from tests.handles import parsed

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
    freeze(owner.process.pid)
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


def contact_in(raw: bytes) -> Contact:
    """Where the owner of a handle lets others in, as everybody reads who gets hold of it."""
    handle, _, _ = parsed(raw)
    contact = UcxCard.of(handle.card).contact
    assert contact is not None
    return contact


def test_who_has_read_a_handle_but_knows_no_secret_is_not_let_in(owner: RemoteOwner) -> None:
    _, raw = owner("make_filled", NBYTES, 7)
    contact = contact_in(raw)
    strange = Keys(b"a secret of somebody else").derived(b"wire-up")
    with pytest.raises(TransferError, match="does not know the secret"):
        Admission(contact, strange, [SocketPlace.of(("127.0.0.1", 0))], time.monotonic() + 20)
    with Admission(contact, process.current().keys.derived(b"wire-up"), [], time.monotonic() + 20) as admission:
        assert admission.listeners
    assert reads_its_content(RDMABuffer.deserialize(raw))


def test_a_secret_without_the_handle_of_that_owner_is_not_enough(owner: RemoteOwner) -> None:
    _, raw = owner("make_filled", NBYTES, 7)
    guessed = dataclasses.replace(contact_in(raw), token=bytes(16))
    with pytest.raises(TransferError, match="token"):
        Admission(guessed, process.current().keys.derived(b"wire-up"), [], time.monotonic() + 20)


def test_an_owner_in_a_job_lets_in_processes_of_its_user_outside_of_it() -> None:
    inside = RemoteOwner(
        {"backend": "ucx", "ucx": {"TLS": "tcp,self"}},
        shared=False,
        module="tests.dataplane.backends.ucx.test_connecting",
    )
    inside("enter_job", b"the secret of a job")
    _, raw = inside("make_filled", NBYTES, 7)
    assert reads_its_content(RDMABuffer.deserialize(raw))
    inside.close()


class Member(Memory):
    """An owner that takes part in a job."""

    def enter_job(self, secret: bytes) -> None:
        trust.enter_job(secret)


if __name__ == "__main__":
    main(Member)
