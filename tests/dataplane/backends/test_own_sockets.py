"""`own_sockets`: looking at the sockets of this process changes nothing about them."""

import os
import socket

from skipper.dataplane.backends import own_sockets


def test_a_copy_leaves_the_flags_of_the_socket_as_they_are() -> None:
    before = socket.getdefaulttimeout()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        socket.setdefaulttimeout(30)
        try:
            copy = own_sockets.copy_of(listener.fileno())
        finally:
            socket.setdefaulttimeout(before)
        assert copy is not None
        with copy:
            assert os.get_blocking(listener.fileno())
            assert copy.getsockname() == listener.getsockname()


def test_both_kinds_of_addresses_are_told_and_nothing_else_is_a_socket() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        copy = own_sockets.copy_of(listener.fileno())
        assert copy is not None
        with copy:
            assert copy.getsockname() == listener.getsockname()
    read, write = os.pipe()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        assert own_sockets.copy_of(datagrams.fileno()) is None
    assert own_sockets.copy_of(read) is None
    os.close(read)
    os.close(write)
    assert own_sockets.copy_of(read) is None
