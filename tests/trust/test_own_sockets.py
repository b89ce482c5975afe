"""`own_sockets`: looking at the sockets of this process changes nothing about them."""

import contextlib
import os
import select
import socket
import struct
from collections.abc import Callable

import pytest

from skipper.trust import own_sockets


def inode_of(fd: int) -> int:
    return os.fstat(fd).st_ino


def test_a_copy_leaves_the_flags_of_the_socket_as_they_are() -> None:
    before = socket.getdefaulttimeout()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        socket.setdefaulttimeout(30)
        try:
            copy = own_sockets.copy_of(listener.fileno(), inode_of(listener.fileno()))
        finally:
            socket.setdefaulttimeout(before)
        assert copy is not None
        with copy:
            assert os.get_blocking(listener.fileno())
            assert copy.getsockname() == listener.getsockname()


def test_both_kinds_of_addresses_are_told_and_nothing_else_is_a_socket() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        copy = own_sockets.copy_of(listener.fileno(), inode_of(listener.fileno()))
        assert copy is not None
        with copy:
            assert copy.getsockname() == listener.getsockname()
    read, write = os.pipe()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        assert own_sockets.copy_of(datagrams.fileno(), inode_of(datagrams.fileno())) is None
    inode = inode_of(read)
    assert own_sockets.copy_of(read, inode) is None
    os.close(read)
    os.close(write)
    assert own_sockets.copy_of(read, inode) is None


def test_a_descriptor_that_was_given_to_another_socket_since_is_not_taken_for_the_first() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        known = own_sockets.descriptors()
        os.dup2(second.fileno(), first.fileno())
        assert own_sockets.copy_of(first.fileno(), known[first.fileno()]) is None
        assert first.fileno() in own_sockets.listening(known)
        assert second.fileno() not in own_sockets.listening(known)


@pytest.mark.parametrize("is_reset", [False, True])
def test_of_a_disowned_connection_nothing_is_read_and_others_go_on(is_reset: bool) -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        other = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        accepted = []
        for server in (listener, other):
            stranger = stack.enter_context(socket.create_connection(server.getsockname()))
            accepted.append(stack.enter_context(server.accept()[0]))
            stranger.sendall(b"forged")
            assert accepted[-1].recv(6, socket.MSG_PEEK | socket.MSG_WAITALL) == b"forged"
            if is_reset and server is listener:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                stranger.close()
        own_sockets.disown([own_sockets.SocketPlace.of(listener.getsockname())])
        assert [each.recv(64) for each in accepted] == [b"", b"forged"]
        stack.enter_context(socket.create_connection(listener.getsockname()))  # it still listens
        listener.accept()[0].close()


def test_sockets_that_were_never_connected_are_left_as_they_are() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        own_sockets.disown([own_sockets.SocketPlace.of(bound.getsockname())])
        bound.listen()


def test_who_waits_for_a_socket_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, select.epoll() as waiting, select.epoll() as idle:
        waiting.register(listener, select.EPOLLIN)
        found = dict(own_sockets.event_loops())
        assert found[waiting.fileno()] == [(listener.fileno(), inode_of(listener.fileno()))]
        assert found[idle.fileno()] == []


class Connecting(socket.socket):
    """A socket that is connected just after it was first asked for one of its ends."""

    def connect_later(self, there: tuple[str, int]) -> None:
        self._there: tuple[str, int] | None = there

    def getsockname(self) -> tuple[str, int]:
        return self._asked(super().getsockname)

    def getpeername(self) -> tuple[str, int]:
        return self._asked(super().getpeername)

    def _asked(self, ask: Callable[[], tuple[str, int]]) -> tuple[str, int]:
        there, self._there = self._there, None
        try:
            return ask()
        finally:
            if there is not None:
                self.connect(there)


def test_both_ends_of_a_connection_are_told_or_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, Connecting() as connection:
        connection.connect_later(listener.getsockname())
        assert own_sockets.ends(connection) is None
        found = own_sockets.ends(connection)
        accepted, source = listener.accept()
        accepted.close()
        assert found == (own_sockets.SocketPlace.of(source), own_sockets.SocketPlace.of(listener.getsockname()))
