"""Within a host gRPC is begun with the first who dials by it."""

import asyncio
import contextlib
import gc
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from skipper.control import Actor, ActorMesh, ProcMesh, endpoint
from skipper.control.runtime import current_runtime as runtime
from skipper.control.wire import grpc_door
from skipper.control.wire._poller import Poller
from skipper.control.wire.socket_forwarder import SocketForwarder
from tests.control.conftest import PATIENCE_S, Script
from tests.control.wire.test_strangers import METHOD, hello


class Inner(Actor):
    """Tells what is in its process."""

    @endpoint
    def knows_grpc(self) -> bool:
        """Whether gRPC has been imported."""
        return "grpc" in sys.modules

    @endpoint
    def threads(self) -> list[str]:
        """Their names."""
        return [thread.name for thread in threading.enumerate()]


@pytest.fixture
def inner(procs: ProcMesh) -> ActorMesh[Inner]:
    return procs.slice(gpus=1).spawn("inner", Inner)


def knock(address: str) -> tuple[grpc.StatusCode, bool]:
    """What a stranger finds who dials by gRPC: the status, and whether it was shown a proof."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.stream_stream(METHOD)(iter([b"no proof"]), metadata=hello(), timeout=PATIENCE_S)
        said = dict(call.initial_metadata())
        with contextlib.suppress(grpc.RpcError):
            list(call)
        return call.code(), "skipper-proof-bin" in said


def test_a_job_within_a_host_does_without_grpc(script: Callable[[str], Script]) -> None:
    running = script(
        """
import sys
from skipper.control import Actor, endpoint, this_host

class Inner(Actor):
    @endpoint
    def knows_grpc(self) -> bool:
        return "grpc" in sys.modules

inner = this_host().spawn_procs(per_host={"gpus": 2}).spawn("inner", Inner)
print(list(inner.knows_grpc.call().get()), "grpc" in sys.modules)
"""
    )
    assert running.finish() == (0, "[False, False] False\n", "")


def test_the_first_who_dials_by_grpc_is_served_and_so_are_many_at_once(inner: ActorMesh[Inner]) -> None:
    assert "control-door" not in inner.threads.call_one().get(PATIENCE_S)
    with ThreadPoolExecutor(8) as strangers:
        found = list(strangers.map(knock, [inner.root_members[0].address] * 8))
    assert found == [(grpc.StatusCode.UNAUTHENTICATED, True)] * 8
    assert inner.knows_grpc.call_one().get(PATIENCE_S)
    assert knock(runtime.current().me.address) == (grpc.StatusCode.UNAUTHENTICATED, True)
    assert inner.knows_grpc.call_one().get(PATIENCE_S)


def test_a_door_that_was_knocked_at_closes_whatever_is_going_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_door, "_most_connections", lambda: 3)
    poller = Poller("test-door")
    before = set(threading.enumerate())
    opened, accepted = threading.Event(), list[socket.socket]()
    inner = socket.socket(socket.AF_UNIX)

    def open_listener(target: str) -> None:
        inner.bind("\0" + target.partition(":")[2])
        inner.listen()
        opened.set()

    door = grpc_door.GrpcDoor("test-door-1", poller, open_listener)
    *callers, late = (socket.socket(socket.AF_UNIX) for _ in range(6))
    try:
        for caller in callers:
            caller.settimeout(PATIENCE_S)
            caller.connect("\0skipper-test-door-1")
        assert opened.wait(PATIENCE_S)
        accepted += [inner.accept()[0] for _ in range(3)]
        callers[0].sendall(b"to gRPC")
        assert accepted[0].recv(7) == b"to gRPC"
        assert [caller.recv(1) for caller in callers[3:]] == [b"", b""]  # beyond what is let in at a time
        asyncio.run(door.close())
        assert [caller.recv(1) for caller in callers[:3]] == [b""] * 3
        assert set(threading.enumerate()) <= before
        asyncio.run(door.close())
        with pytest.raises(ConnectionRefusedError):
            late.connect("\0skipper-test-door-1")
    finally:
        for each in (*callers, late, inner, *accepted):
            each.close()
        poller.close()


def test_a_connection_that_is_half_closed_is_forwarded_until_the_other_half_is() -> None:
    inner, outer = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    inner.bind("\0test-half-closed")
    inner.listen()
    outer.bind("\0test-half-closed-outer")
    outer.listen()
    forwarder = SocketForwarder(outer, "test-half-closed")
    with inner, socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENCE_S)
        client.connect("\0test-half-closed-outer")
        with inner.accept()[0] as there:
            client.sendall(b"all")
            client.shutdown(socket.SHUT_WR)
            there.settimeout(PATIENCE_S)
            assert b"".join(iter(lambda: there.recv(16), b"")) == b"all"
            for _ in range(3):
                gc.collect()  # what waits for the other half is held by the forwarder alone
            there.sendall(b"answer")
        assert b"".join(iter(lambda: client.recv(16), b"")) == b"answer"
    forwarder.close()


def test_a_job_ends_at_once_whose_only_address_could_not_be_listened_on(script: Callable[[str], Script]) -> None:
    running = script(
        """
from skipper.control import shutdown
from skipper.control.model.errors import WireError
from skipper.control.runtime import current_runtime

try:
    current_runtime.current().listen_beyond("192.0.2.1", None, data_plane_is_open=False)
except WireError as error:
    print("cannot listen on 192.0.2.1" in str(error))
shutdown()
"""
    )
    code, out, err = running.finish()
    assert (code, out) == (0, "True\n"), err  # gRPC says on standard error why it cannot
    assert "Traceback" not in err


def test_a_door_that_nobody_knocks_at_has_no_thread() -> None:
    poller = Poller("test-door")
    before = threading.active_count()
    door = grpc_door.GrpcDoor("test-door-2", poller, lambda target: pytest.fail("nobody came"))
    assert threading.active_count() == before
    asyncio.run(door.close())
    poller.close()


def test_a_fork_leaves_the_door_to_the_original(script: Callable[[str], Script]) -> None:
    running = script(
        """
import os
from skipper.control import this_host
from skipper.control.runtime import current_runtime

this_host().spawn_procs().stop().get()
if (copy := os.fork()) == 0:
    os._exit(0)
os.waitpid(copy, 0)
from tests.control.wire.test_grpc_door import knock

print(*knock(current_runtime.current().me.address))
"""
    )
    assert running.finish() == (0, "StatusCode.UNAUTHENTICATED True\n", "")
