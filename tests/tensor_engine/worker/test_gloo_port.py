"""gloo's port while the members of a group connect: what somebody gets who connects to it and is none of them."""

import contextlib
import fcntl
import os
import resource
import select
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, TypeVar

import psutil
import pytest
import torch
import torch.distributed as dist

from skipper.control import ActorError, Future, this_host
from skipper.tensor_engine.errors import CommunicationError, CommunicationTimeoutError
from skipper.tensor_engine.shared.rendezvous import RendezvousClient
from skipper.tensor_engine.worker.gloo_group import make_gloo
from skipper.tensor_engine.worker.gloo_port import GlooPort
from skipper.tensor_engine.worker.groups import Group
from skipper.trust import own_sockets, socket_filter
from tests.tensor_engine.members import PATIENCE_S, Members, members_of

T = TypeVar("T")

STRANGER = 54_321
SHORT_S = 0.3
"""How long to wait for what never comes."""

HAMMER = Path(__file__).with_name("hammer_script.py")


@pytest.fixture
def port() -> Iterator[GlooPort]:
    made = GlooPort.open()
    yield made
    made.close()


def knock(port: GlooPort) -> socket.socket:
    """Begin to connect to it."""
    stranger = socket.socket()
    stranger.settimeout(SHORT_S)
    try:
        stranger.connect(("127.0.0.1", port.place.port))
    except OSError:
        stranger.close()
        raise
    return stranger


def test_there_is_no_port_where_strangers_cannot_be_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    before = own_sockets.descriptors()
    monkeypatch.setattr(socket_filter, "obstacle", lambda: "no filters")
    with pytest.raises(CommunicationError, match="open to all users: no filters"):
        GlooPort.open()
    assert own_sockets.descriptors() == before


def test_nobody_can_connect_before_the_members_are_there(port: GlooPort) -> None:
    with pytest.raises(TimeoutError):
        knock(port)
    port.let_in()
    knock(port).close()


def unread(known: Mapping[int, int], place: own_sockets.SocketPlace) -> list[int]:
    """How many bytes wait in each connection that was accepted at a place and is not among the known sockets."""
    return [
        int.from_bytes(fcntl.ioctl(copy, termios.FIONREAD, bytes(4)), sys.byteorder)
        for _, copy in own_sockets.opened(known)
        if (own_sockets.ends(copy) or [None])[0] == place
    ]


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
def test_a_port_that_somebody_reached_before_its_filter_is_not_used(
    monkeypatch: pytest.MonkeyPatch, *, is_reset: bool
) -> None:
    create = dist.ProcessGroupGloo.create_device
    reached: list[own_sockets.SocketPlace] = []

    def create_and_be_reached(hostname: str) -> object:
        known = own_sockets.descriptors()
        device = create(hostname=hostname)
        if not reached:
            (place,) = own_sockets.listening(known).values()
            reached.append(place)
            with socket.create_connection((hostname, place.port)) as stranger:
                stranger.sendall(struct.pack("=q", 1))  # as the member does that has this number
                read = threading.Event()
                while unread(known, place) != [0]:  # gloo's thread accepts the connection and reads
                    assert not read.wait(0.001)
                if is_reset:
                    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("=ii", 1, 0))
        return device

    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", create_and_be_reached)
    port = GlooPort.open()
    port.close()
    assert reached
    assert port.place not in reached


def test_what_a_stranger_sends_is_not_delivered_and_his_connection_ends_with_the_port(port: GlooPort) -> None:
    port.let_in()
    with knock(port) as stranger, knock(port) as member:
        for connection in (stranger, member):
            connection.sendall(b"8 bytes!")
        here = own_sockets.SocketPlace.of(member.getsockname())
        accepted = threading.Event()
        while not port.take([here]):  # gloo's thread accepts it
            assert not accepted.wait(0.001)
        port.close()
        stranger.settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            knock(port)


def test_the_port_is_closed_for_good_and_the_process_goes_on(port: GlooPort) -> None:
    before = set(own_sockets.listening({}).values())
    assert port.place in before
    port.close()
    port.close()
    assert port.place not in own_sockets.listening({}).values()
    del port.device


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open nothing."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def no_temporary_files() -> Iterator[None]:
    """There is no folder for them."""
    before, tempfile.tempdir = tempfile.tempdir, "/nowhere"
    try:
        yield
    finally:
        tempfile.tempdir = before


@pytest.mark.parametrize("without", [no_descriptors, no_temporary_files])
def test_a_port_that_cannot_be_closed_says_so_and_lets_nobody_in_until_it_can(
    port: GlooPort, without: Callable[[], AbstractContextManager[None]]
) -> None:
    with without(), pytest.raises(CommunicationError, match=r"gloo's port .*(cannot|could not) be closed"):
        port.close()
    with pytest.raises(TimeoutError):
        knock(port)
    port.close()
    with pytest.raises(ConnectionRefusedError):
        knock(port)


def test_a_kick_reaches_the_members_and_no_other_connection_from_the_same_port(port: GlooPort) -> None:
    with contextlib.ExitStack() as stack:
        accepted = []
        source = ("127.0.0.1", 0)
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        for listener in listeners:
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            connection.bind(source)
            connection.connect(listener.getsockname())
            source = connection.getsockname()
            accepted.append(stack.enter_context(listener.accept()[0]))
        member, other = accepted
        port.kick([own_sockets.SocketPlace.of(listeners[0].getsockname())])
        assert select.select([], [], [member], PATIENCE_S)[2]
        assert not select.select([], [], [other], 0)[2]


def swap(group: Group) -> list[int]:
    """What each member has sent to this one."""
    sent = torch.full((group.size, 8), group.rank + 1, dtype=torch.uint8)
    got = torch.empty_like(sent)
    group.swap(sent, got)
    return [int(row[0]) for row in got]


def listening(group: Group) -> int:
    """How many ports this process has."""
    return len(own_sockets.listening({}))


def process_id(group: Group) -> int:
    """Of a member."""
    return os.getpid()


def tell_ports(pids: list[int], hammer: IO[str], is_over: threading.Event) -> None:
    """Say which ports these processes listen at, sooner than a stranger could know."""
    told: set[tuple[str, int]] = set()
    processes = [psutil.Process(pid) for pid in pids]
    while not is_over.is_set():
        for process in processes:
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr not in told:
                    told.add(connection.laddr)
                    hammer.write(f"{connection.laddr.ip} {connection.laddr.port}\n")
                    hammer.flush()


@pytest.fixture(scope="module")
def members() -> Iterator[Members]:
    procs = this_host().spawn_procs({"gpus": 4}, env={"OMP_NUM_THREADS": "1"})
    yield members_of(procs)
    procs.stop().get(PATIENCE_S)


def test_a_group_of_four_forms_and_leaves_no_port_open(members: Members) -> None:
    assert members.run(swap) == [[1, 2, 3, 4]] * 4
    assert members.run(listening) == [0] * 4


class Counting(RendezvousClient):
    """Counts what its member asks the script for."""

    def __init__(self) -> None:
        super().__init__(PATIENCE_S)
        self.gatherings: list[str] = []

    def begin_gathering(self, key: str, brought: Mapping[int, T], members: Sequence[int]) -> Future[dict[int, T]]:
        self.gatherings.append(key.rpartition("/")[2])
        return super().begin_gathering(key, brought, members)


kept: list[object] = []
"""Groups of a member: one that closes its own while others still connect makes gloo fail on these."""


def gatherings_of_another(group: Group) -> list[str]:
    """In which the members of a group make another one of the same."""
    point = Counting()
    kept.append(make_gloo(point, f"counted by {group.members}", group.rank, group.members))
    return sorted(point.gatherings)


def test_members_meet_as_often_however_many_they_are(members: Members) -> None:
    for size in (2, 3, 4):
        counted = members.run(gatherings_of_another, members=range(size), stream="counted")
        assert counted == [["addresses", "connected", "here", "taken"]] * size


def test_another_user_who_tries_every_port_gets_nothing_and_disturbs_no_group(members: Members) -> None:
    pids = members.run(process_id)
    command = [sys.executable, "-S", str(HAMMER), str(STRANGER)]
    is_over = threading.Event()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/") as hammer:
        teller = threading.Thread(target=tell_ports, args=(pids, hammer.stdin, is_over))
        teller.start()
        try:
            for number in range(8):
                assert members.run(swap, stream=f"beside a stranger {number}") == [[1, 2, 3, 4]] * 4
        finally:
            is_over.set()
            teller.join()
        tried, heard = map(int, hammer.communicate(timeout=PATIENCE_S)[0].split())
    assert tried > 0
    assert heard == 0
    assert members.run(listening) == [0] * 4


def late(group: Group) -> None:
    """A group is made."""


def test_members_that_do_not_come_are_named_to_those_who_wait(members: Members) -> None:
    hasty = members_of(members.procs, timeout_s=SHORT_S)
    with pytest.raises(ActorError, match=r"ranks \[2, 3\] of 4 have not arrived") as caught:
        hasty.mesh.run_without.call(late, (0, 1, 2, 3), (2, 3)).get(PATIENCE_S)
    assert isinstance(caught.value.cause, CommunicationTimeoutError)
    assert hasty.run(swap, members=(2, 3)) == [[1, 2], [1, 2]]
