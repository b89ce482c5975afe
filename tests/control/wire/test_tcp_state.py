"""Connections whose other side has hung up, found without their owner's help."""

import socket
from collections.abc import Iterator

import pytest

from skipper.control.wire.tcp_state import ConnectionWatch


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def target(listener: socket.socket) -> str:
    return f"localhost:{listener.getsockname()[1]}"


def test_a_connection_that_the_other_side_has_closed_is_seen_and_others_to_there_do_not_matter(
    listener: socket.socket,
) -> None:
    with socket.create_connection(listener.getsockname()), listener.accept()[0] as other:
        watch = ConnectionWatch(target(listener))
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as mine:
            watch.begin()
            other.close()
            assert not watch.has_hung_up()
            mine.close()
            assert watch.has_hung_up()


def test_a_connection_that_this_side_has_closed_counts_as_ended(listener: socket.socket) -> None:
    watch = ConnectionWatch(target(listener))
    with socket.create_connection(listener.getsockname()):
        watch.begin()
        assert not watch.has_hung_up()
    assert watch.has_hung_up()


@pytest.mark.parametrize("words", ["", "host", "host:", "unix:/tmp/socket", "host:http"])
def test_of_what_was_not_found_nothing_is_said(words: str) -> None:
    watch = ConnectionWatch(words)
    watch.begin()
    assert not watch.has_hung_up()
