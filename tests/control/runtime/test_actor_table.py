"""Messages for actors that are not there: not yet, or not any more."""

import secrets
import threading
import time

import pytest

from skipper.control import ActorMesh, Extent, Shape, SupervisionError, this_proc
from skipper.control.model.actor import interface_of
from skipper.control.runtime import actor_table, running
from tests.control.actors import Recorder
from tests.control.conftest import PATIENCE_S


def reference(uid: int) -> ActorMesh[Recorder]:
    """What somebody holds who got a reference before the spawn reached the process."""
    members = tuple(this_proc().root_members)
    return ActorMesh(uid, "recorder", members, Extent(), Shape.whole(Extent()), interface_of(Recorder))


def test_messages_that_come_before_the_spawn_wait_for_it_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    uid = secrets.randbits(63)
    early = reference(uid)
    for number in range(10):
        early.note.broadcast(number)
    seen = early.everything.call_one()
    assert not seen.done()
    monkeypatch.setattr(secrets, "randbits", lambda bits: uid)
    recorder = this_proc().spawn("recorder", Recorder)
    assert seen.get(PATIENCE_S) == list(range(10))
    recorder.stop().get(PATIENCE_S)


def test_messages_for_an_actor_that_is_never_spawned_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_table, "SPAWN_GRACE_S", 0.05)
    with pytest.raises(SupervisionError, match="no such actor"):
        reference(secrets.randbits(63)).everything.call_one().get(PATIENCE_S)


def test_messages_wait_on_where_the_process_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by `tests.simulation`: behind SIGCONT the time was over before the message of the spawner was read."""
    monkeypatch.setattr(actor_table, "SPAWN_GRACE_S", 0.05)
    monkeypatch.setattr(actor_table, "_LATE_S", 0.2)
    uid = secrets.randbits(63)
    looks = threading.Semaphore(0)
    give_up_on = actor_table.ActorTable._give_up_on

    def look(table: actor_table.ActorTable, uid: int, due_s: float) -> None:
        monkeypatch.setattr(actor_table, "SPAWN_GRACE_S", PATIENCE_S)
        give_up_on(table, uid, due_s)
        looks.release()

    monkeypatch.setattr(actor_table.ActorTable, "_give_up_on", look)
    seen = reference(uid).everything.call_one()
    running.current().loop.call_soon_threadsafe(time.sleep, 0.5)  # type: ignore[attr-defined]
    assert looks.acquire(timeout=PATIENCE_S)
    assert not seen.done()
    monkeypatch.setattr(secrets, "randbits", lambda bits: uid)
    recorder = this_proc().spawn("recorder", Recorder)
    assert seen.get(PATIENCE_S) == []
    recorder.stop().get(PATIENCE_S)


def test_messages_for_an_actor_that_has_stopped_are_refused_at_once() -> None:
    recorder = this_proc().spawn("recorder", Recorder)
    recorder.stop().get(PATIENCE_S)
    late = recorder.everything.call_one()
    assert late.done()
    with pytest.raises(SupervisionError, match="stopped"):
        late.get(PATIENCE_S)
