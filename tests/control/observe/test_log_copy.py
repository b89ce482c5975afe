"""What goes to an agent's output never waits for who reads it, and says what is missing."""

import fcntl
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from skipper.control.observe.log_copy import OutputCopy

LINE = b"a line of a flood\n"
MISSING = re.compile(rb"\n\[skipper\] ([\d,]+) bytes are missing here: they were not read in time\n")
ROOM = 16 << 10


def emptied(end: int) -> bytes:
    """What lies in a pipe or socket."""
    os.set_blocking(end, False)
    parts = []
    while True:
        try:
            parts.append(os.read(end, 1 << 20))
        except BlockingIOError:
            return b"".join(parts)


def a_pipe() -> tuple[int, int]:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, ROOM)
    return reading, writing


def a_socket() -> tuple[int, int]:
    one, other = socket.socketpair()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)
    return one.detach(), other.detach()


@pytest.fixture(params=[a_pipe, a_socket])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    ends = request.param()
    yield ends
    for end in ends:
        os.close(end)


def test_who_reads_sees_all_of_it(ends: tuple[int, int]) -> None:
    reading, writing = ends
    copy = OutputCopy(writing)
    for _ in range(5):
        copy.write(LINE * 20)
    assert emptied(reading) == LINE * 100
    copy.close()


def test_who_does_not_read_holds_nothing_up_and_is_told_how_much_is_missing(ends: tuple[int, int]) -> None:
    reading, writing = ends
    copy = OutputCopy(writing)
    for _ in range(64):
        copy.write(LINE * 1024)
    got = emptied(reading)
    assert (LINE * 1024).startswith(got[: len(LINE)])
    assert not MISSING.search(got)
    copy.write(b"again\n")
    note, rest = re.split(rb"(?<=in time\n)", emptied(reading))
    (count,) = MISSING.findall(note)
    assert int(count.replace(b",", b"")) == 64 * 1024 * len(LINE) - len(got)
    assert rest == b"again\n"
    assert os.get_blocking(writing), "those who share it write as before"
    copy.close()


def test_a_reader_that_has_gone_is_no_error() -> None:
    reading, writing = a_pipe()
    copy = OutputCopy(writing)
    os.close(reading)
    copy.write(LINE)
    copy.close()
    os.close(writing)


def test_a_file_keeps_what_others_write_to_it(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "agent.log", os.O_WRONLY | os.O_CREAT, 0o600)
    copy = OutputCopy(fd)
    os.write(fd, b"before\n")
    copy.write(LINE)
    os.write(fd, b"after\n")
    copy.close()
    os.close(fd)
    assert (tmp_path / "agent.log").read_bytes() == b"before\n" + LINE + b"after\n"
