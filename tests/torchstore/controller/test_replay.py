"""What a controller knows is known by the next one, whatever has happened and wherever that one was lost."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipper.torchstore.algebra.manifest import Binding
from skipper.torchstore.controller import journal as journals
from skipper.torchstore.controller.journal import Journal, JournalMemory
from skipper.torchstore.controller.recorder import Recorder
from skipper.torchstore.controller.state import Command, Effects
from skipper.torchstore.errors import JournalError, KeyNotFoundError, StoreError, VersionNotFoundError
from skipper.torchstore.protocol.messages import Selector, StaleClientError, Wanted
from skipper.torchstore.protocol.origin import ALONE
from skipper.torchstore.support.process import ProcessId
from tests.torchstore.walks import Walker, checkpoint, digest, journal_of, left, reopened


@pytest.fixture
def memory() -> Iterator[JournalMemory]:
    memory = JournalMemory()
    yield memory
    memory.close()


@given(seed=st.integers(0, 1 << 32), lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_the_next_one_knows_the_same(seed: int, lengths: list[int]) -> None:
    memory = JournalMemory()
    try:
        walker = Walker(seed, reopened(memory.address))
        for length in lengths:
            walker.steps(length)
            left(walker.recorder)
            walker.recorder.state.apply(Command("withdraw_all", ()))  # as the next one does
            following = reopened(memory.address)
            assert checkpoint(following.state) == checkpoint(walker.recorder.state)
            walker.recorder = following
        left(walker.recorder)
    finally:
        memory.close()


@given(seed=st.integers(0, 1 << 32), length=st.integers(1, 120), cut=st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_a_picture_in_between_changes_nothing(seed: int, length: int, cut: float) -> None:
    plain, pictured = JournalMemory(), JournalMemory()
    try:
        digests = []
        for memory in (plain, pictured):
            walker = Walker(seed, reopened(memory.address))
            walker.steps(int(length * cut))
            if memory is pictured:
                journal_of(walker.recorder).write_checkpoint(pickle.dumps(walker.recorder.state))
            walker.steps(length - int(length * cut))
            left(walker.recorder)
            digests.append(digest(left(reopened(memory.address))))
        assert digests[0] == digests[1]
    finally:
        plain.close()
        pictured.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_process_with_other_hashes_knows_the_same(memory: JournalMemory, seed: int) -> None:
    walker = Walker(seed, reopened(memory.address))
    walker.steps(1500)
    assert len(walker.done) > 20, walker.done  # all that can be done, and many errors
    left(walker.recorder)
    walker.recorder.state.apply(Command("withdraw_all", ()))
    owner, files = memory.address.owner, memory.address.files
    told = repr((owner.host, owner.pid, owner.start, *files, memory.address.token))
    command = [sys.executable, "-m", "tests.torchstore.walks", told]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": str(seed + 1)}, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip() == digest(walker.recorder), done.stderr


def test_pictures_are_made_by_themselves(memory: JournalMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "_LEAST_CHANGES", 2000)
    walker = Walker(1, reopened(memory.address))
    walker.steps(400)
    assert journal_of(walker.recorder).has_checkpoint
    left(walker.recorder)
    walker.recorder.state.apply(Command("withdraw_all", ()))
    assert checkpoint(left(reopened(memory.address)).state) == checkpoint(walker.recorder.state)


PROCESS, OTHER = ProcessId("elsewhere", 1, 1), ProcessId("elsewhere", 2, 1)


def test_nothing_is_told_to_a_volume_before_it_is_written(memory: JournalMemory) -> None:
    recorder = reopened(memory.address)
    told: list[tuple[Effects, int]] = []

    def tell(effects: Effects) -> None:
        told.append((effects, journal_of(recorder)._end))

    recorder.begin(tell, lambda _history: None)
    client = recorder.do(Command("welcome", (PROCESS, None)))
    end = journal_of(recorder)._end
    recorder.do(Command("process_died", (PROCESS, ())))
    ((effects, written),) = told
    assert effects.dead == [(PROCESS, (), client + 1)]
    assert written > end
    with pytest.raises(StaleClientError):
        recorder.do(Command("reserve", (client, "k"), client, 1))
    left(recorder)


def test_a_request_is_done_once_by_whoever_is_there(memory: JournalMemory) -> None:
    recorder = reopened(memory.address)
    client = recorder.do(Command("welcome", (PROCESS, None)))
    put = Command("put_inline", (client, "k", b"1"), client, 7)
    fails = Command("rollback", ("k", 9), client, 8)
    assert recorder.do(put) == 1
    with pytest.raises(VersionNotFoundError):
        recorder.do(fails)
    left(recorder)
    following = reopened(memory.address)
    assert following.do(put) == 1
    with pytest.raises(VersionNotFoundError):
        following.do(fails)
    assert following.do(put._replace(request=9)) == 2
    following.do(Command("process_died", (PROCESS, ())))
    assert not following.state.was_answered(put)
    left(following)


def test_requests_are_done_once_however_many_are_under_way(memory: JournalMemory) -> None:
    recorder = reopened(memory.address)
    client = recorder.do(Command("welcome", (PROCESS, None)))
    commands = [Command("put_inline", (client, f"k{at}", b"1"), client, at, 1) for at in range(1, 600)]
    for command in commands:
        assert recorder.do(command) == 1
    following = reopened(left(recorder) and memory.address)
    assert [following.do(command) for command in commands] == [1] * len(commands)
    later = Command("put_inline", (client, "k1", b"2"), client, 600, 600)
    assert following.do(later) == 2
    assert not following.state.was_answered(commands[0]), "the client has said that it has heard that"
    left(following)


def test_what_was_refused_does_not_keep_what_was_asked(memory: JournalMemory) -> None:
    recorder = reopened(memory.address)
    client = recorder.do(Command("welcome", (PROCESS, None)))
    refused = Command("rollback", ("k", 9), client, 1, 1)
    for _ in range(2):
        with pytest.raises(KeyNotFoundError):
            recorder.do(refused)
    answer = recorder.state._answers.find(client, 1)
    assert answer is not None
    assert answer.outcome.__traceback__ is None
    left(recorder)


def test_a_command_that_fails_fails_again_and_the_store_goes_on(memory: JournalMemory) -> None:
    recorder = reopened(memory.address)
    client = recorder.do(Command("welcome", (PROCESS, None)))
    with pytest.raises(TypeError):
        recorder.do(Command("put_inline", (client, ["no key"], b"1"), client, 1, 1))
    assert recorder.do(Command("put_inline", (client, "k", b"1"), client, 2, 1)) == 1
    left(recorder)
    assert left(reopened(memory.address)).state.index.keys(None) == ["k"]


def test_all_that_a_volume_may_not_have_heard_is_said_again(
    memory: JournalMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skipper.torchstore.controller.ledger._REMEMBERED", 4)
    walker = Walker(5, reopened(memory.address))
    client = walker.recorder.do(Command("welcome", (PROCESS, None)))
    walker.clients = {client: PROCESS}
    arenas = []
    for at in range(20):
        binding = Binding(f"arena {at}", "snapshot", "0", ())
        arenas.append(binding.id)
        sent = replace(walker.publication(client, f"k{at}", ALONE), version=None, binding=binding)
        walker.recorder.do(Command("publish", (0.0, client, (sent,))))
    walker.recorder.do(Command("delete", (tuple(f"k{at}" for at in range(20)), False)))
    left(walker.recorder)
    owed = left(reopened(memory.address)).owed()
    assert set(arenas) == {arena for effects in owed for arena in effects.freed.get("0", [])}


def test_a_picture_is_not_made_anew_by_who_only_reads_it(
    memory: JournalMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "_LEAST_CHANGES", 1000)
    recorder = reopened(memory.address)
    client = recorder.do(Command("welcome", (PROCESS, None)))
    for at in range(50):
        recorder.do(Command("put_inline", (client, f"k{at}", bytes(200)), client, at + 1, at + 1))
    journal_of(recorder).write_checkpoint(pickle.dumps(recorder.state))
    number = journal_of(recorder)._number
    for _ in range(3):
        left(recorder)
        recorder = reopened(memory.address)
    assert journal_of(recorder)._number == number
    left(recorder)


def test_a_picture_that_fails_is_no_failure_of_what_was_done(
    memory: JournalMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = reopened(memory.address)
    client = recorder.do(Command("welcome", (PROCESS, None)))
    monkeypatch.setattr(journals, "_LEAST_CHANGES", 100)

    def no_memory(*_: object, **__: object) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("skipper.torchstore.controller.recorder._checkpoint_of", no_memory)
        assert recorder.do(Command("put_inline", (client, "k", bytes(500)), client, 1, 1)) == 1
    left(recorder)
    assert left(reopened(memory.address)).state.index.keys(None) == ["k"]


def test_leases_that_nobody_speaks_for_are_given_back(memory: JournalMemory) -> None:
    walker = Walker(3, reopened(memory.address))
    recorder = walker.recorder
    first, other = (recorder.do(Command("welcome", (process, None))) for process in (PROCESS, OTHER))
    binding, wanted = walker.binding("snapshot"), (Wanted("k", Selector()),)
    publication = walker.publication
    walker.clients = {first: PROCESS, other: OTHER}
    sent = replace(publication(first, "k", ALONE), version=None, binding=binding, keep=1)
    recorder.do(Command("publish", (0.0, first, (sent,))))
    leases = [
        (grant.key, grant.lease)
        for client in (first, first, other)
        for grant in recorder.attempt(Command("grant", (client, wanted)), bool)
    ]
    left(recorder)
    following = reopened(memory.address)
    for command in following.abandoned(PROCESS, frozenset(leases[1:2]), frozenset()):
        following.do(command)
    assert following.state.leases() == {PROCESS: ({leases[1]}, set()), OTHER: ({leases[2]}, set())}
    (since,) = following.attempt(Command("grant", (first, wanted)), bool)
    for command in following.abandoned(PROCESS, frozenset(leases[1:2]), frozenset()):
        following.do(command)
    assert following.state.leases()[PROCESS] == ({leases[1], (since.key, since.lease)}, set()), (
        "that is not from before"
    )
    left(following)


def test_a_journal_of_something_else_is_refused(memory: JournalMemory) -> None:
    for content in (b"no pickle", pickle.dumps(7)):
        journal = Journal(memory.address, 1.0)
        list(journal.read())
        journal.append(content)
        journal.close()
        recorder = Recorder("s")
        with pytest.raises(JournalError, match="cannot be read"):
            recorder.open(Journal(memory.address, 1.0))
        memory.close()
        memory.__init__()  # type: ignore[misc]


def test_a_change_for_which_there_is_no_memory_is_not_done(
    memory: JournalMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = reopened(memory.address)
    client = recorder.do(Command("welcome", (PROCESS, None)))
    recorder.do(Command("put_inline", (client, "k", b"1"), client, 1))
    before = digest(recorder)

    def refuse(nbytes: int) -> None:
        raise JournalError("not enough memory for the journal")

    monkeypatch.setattr(journal_of(recorder), "prepare", refuse)
    for attempt in (
        lambda: recorder.do(Command("put_inline", (client, "k", b"2"), client, 2)),
        lambda: recorder.attempt(Command("grant", (client, (Wanted("k", Selector()),))), bool),
        lambda: recorder.do(Command("delete", (("k",), False), client, 3)),
    ):
        with pytest.raises(StoreError, match="not enough memory"):
            attempt()
    assert digest(recorder) == before
    left(recorder)
