"""The journal itself: what was written is read, whatever its writer was doing when it died."""

import os
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipper.torchstore.controller import journal as module
from skipper.torchstore.controller.journal import Journal, JournalMemory
from skipper.torchstore.errors import JournalError

Opened = Callable[[], Journal]


@pytest.fixture
def memory() -> Iterator[JournalMemory]:
    memory = JournalMemory()
    yield memory
    memory.close()


def everything(journal: Journal) -> tuple[bytes | None, list[bytes]]:
    """The checkpoint, and the changes since."""
    records = journal.read()
    checkpoint = b"".join(takewhile(bool, records)) if journal.has_checkpoint else None
    return checkpoint, list(records)


def reopened(memory: JournalMemory) -> tuple[bytes | None, list[bytes]]:
    journal = Journal(memory.address, 1.0)
    try:
        return everything(journal)
    finally:
        journal.close()


def written(memory: JournalMemory, *changes: bytes, checkpoint: bytes | None = None) -> None:
    journal = Journal(memory.address, 1.0)
    assert everything(journal) == (None, [])
    if checkpoint is not None:
        journal.write_checkpoint(checkpoint)
    for change in changes:
        journal.append(change)
    journal.close()


@given(
    before=st.lists(st.binary(min_size=1, max_size=50)),
    checkpoint=st.none() | st.binary(min_size=1, max_size=200),
    after=st.lists(st.binary(min_size=1, max_size=50)),
)
@settings(max_examples=50, deadline=None)
def test_what_was_written_is_read_in_its_order(
    before: list[bytes], checkpoint: bytes | None, after: list[bytes]
) -> None:
    memory = JournalMemory()
    try:
        journal = Journal(memory.address, 1.0)
        assert everything(journal) == (None, [])
        for change in before:
            journal.append(change)
        if checkpoint is not None:
            journal.write_checkpoint(checkpoint)
        for change in after:
            journal.append(change)
        journal.close()
        assert reopened(memory) == (checkpoint, after if checkpoint is not None else before + after)
    finally:
        memory.close()


def test_it_can_be_gone_on_with_and_pictured_again_and_again(memory: JournalMemory) -> None:
    for number in range(5):
        journal = Journal(memory.address, 1.0)
        checkpoint, changes = everything(journal)
        assert (checkpoint, changes) == ((b"picture %d" % (number - 1), [b"change"]) if number else (None, []))
        journal.append(b"is in the picture")
        journal.write_checkpoint(b"picture %d" % number)
        journal.append(b"change")
        journal.close()


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_record_that_was_cut_short_does_not_count(memory: JournalMemory, cut: int) -> None:
    written(memory, b"first", b"other")
    fd = memory.address.files[0]
    os.ftruncate(fd, content_nbytes(fd, [b"first", b"other"]) - cut)
    assert reopened(memory) == (None, [b"first"])


def content_nbytes(fd: int, records: list[bytes]) -> int:
    """Where they end, as any reader of the format would say."""
    end = 28 + sum(8 + len(record) for record in records)
    assert os.pread(fd, len(records[-1]), end - len(records[-1])) == records[-1]
    return end


@pytest.mark.parametrize("at", range(13))
def test_a_record_with_a_wrong_byte_ends_what_is_read(memory: JournalMemory, at: int) -> None:
    written(memory, b"first", b"other", b"third")
    fd = memory.address.files[0]
    begin = content_nbytes(fd, [b"first"])
    old = os.pread(fd, 1, begin + at)
    os.pwrite(fd, bytes([old[0] ^ 0x40]), begin + at)
    assert reopened(memory) == (None, [b"first"])
    journal = Journal(memory.address, 1.0)
    everything(journal)
    journal.append(b"instead")
    journal.close()
    assert reopened(memory) == (None, [b"first", b"instead"])


@pytest.mark.parametrize("nbytes", [0, 10, 27])
def test_a_picture_without_its_header_leaves_what_was_before(memory: JournalMemory, nbytes: int) -> None:
    written(memory, b"first")
    other = memory.address.files[1]
    journal = Journal(memory.address, 1.0)
    everything(journal)
    whole = os.pread(memory.address.files[0], 28, 0)
    os.pwrite(other, struct.pack("<II", 7, 0) + b"picture", 28)
    os.pwrite(other, whole[:nbytes], 0)
    journal.close()
    assert reopened(memory) == (None, [b"first"])


def test_who_dies_between_the_two_headers_leaves_the_picture(
    memory: JournalMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(memory.address, 1.0)
    everything(journal)
    journal.append(b"change")
    cuts: list[Any] = []
    real = os.ftruncate
    monkeypatch.setattr(
        module.os, "ftruncate", lambda fd, size: cuts.append(fd) if cuts else cuts.append(real(fd, size))
    )
    journal.write_checkpoint(b"picture")
    monkeypatch.undo()
    journal.close()
    assert os.fstat(memory.address.files[0]).st_size > 28, "the old one is whole still"
    assert reopened(memory) == (b"picture", [])


def test_a_large_picture_comes_back(memory: JournalMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGEST", 1000)
    checkpoint = os.urandom(2501)
    written(memory, b"change", checkpoint=checkpoint)
    assert reopened(memory) == (checkpoint, [b"change"])


def test_it_says_when_it_is_time_for_a_picture(memory: JournalMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAST_CHANGES", 1000)
    journal = Journal(memory.address, 1.0)
    everything(journal)
    assert not journal.needs_checkpoint
    journal.append(bytes(1000))
    assert journal.needs_checkpoint
    journal.write_checkpoint(bytes(5000))
    journal.append(bytes(4000))
    assert not journal.needs_checkpoint, "the changes are to be as large as the checkpoint"
    journal.append(bytes(1100))
    assert journal.needs_checkpoint
    journal.close()


def test_there_is_one_writer_at_a_time_and_one_that_dies_is_none(memory: JournalMemory) -> None:
    source = (
        "import sys, time\n"
        "from skipper.torchstore.controller.journal import Journal, JournalAddress\n"
        "from skipper.torchstore.support.process import ProcessId\n"
        f"address = {memory.address!r}\n"
        "journal = Journal(address, 1.0)\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        other.send_signal(signal.SIGSTOP)
        with pytest.raises(JournalError, match="another controller still writes"):
            Journal(memory.address, 0.2)
        other.kill()
        Journal(memory.address, 10.0).close()


def test_other_memory_under_its_descriptors_is_not_taken_for_it(memory: JournalMemory) -> None:
    stranger = JournalMemory()
    try:
        with pytest.raises(JournalError, match="no header"):
            Journal(replace(memory.address, files=stranger.address.files), 1.0)
        read, write = os.pipe()
        with pytest.raises(JournalError, match="has closed the journal"):
            Journal(replace(memory.address, files=(read, write)), 1.0)
        os.close(read)
        os.close(write)
    finally:
        stranger.close()


def test_a_journal_that_is_gone_says_so(memory: JournalMemory) -> None:
    memory.close()
    with pytest.raises(JournalError):
        Journal(memory.address, 1.0)


def test_nobody_else_may_open_it(memory: JournalMemory) -> None:
    for fd in memory.address.files:
        assert os.fstat(fd).st_mode & 0o777 == 0o600
        assert not os.get_inheritable(fd)


def test_memory_that_runs_out_is_an_error_before_anything_is_added(memory: JournalMemory) -> None:
    journal = Journal(memory.address, 1.0)
    everything(journal)
    journal.append(b"first")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
    try:
        with pytest.raises(JournalError, match="not enough memory"):
            journal.append(bytes(4 << 20))
        with pytest.raises(JournalError, match="not enough memory"):
            journal.write_checkpoint(bytes(4 << 20))
        journal.append(b"second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    journal.close()
    assert reopened(memory) == (None, [b"first", b"second"])
