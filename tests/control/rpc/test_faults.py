"""Servers that die, freeze, restart elsewhere, and ports where something else listens."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest

from skipper.control import DeadlineError
from skipper.control.model.errors import (
    ConnectionLostError,
    HandleExpiredError,
    NameNotFoundError,
    RpcError,
    UnreachableError,
)
from skipper.control.rpc import (
    ActorServer,
    FixedResolver,
    MetadataMapping,
    MetadataResolver,
    MetadataServer,
    RpcClient,
    RpcOptions,
)
from tests.control.conftest import wait_until
from tests.control.rpc.conftest import client_of
from tests.control.rpc.parties import PATIENCE_S, Calculator, Fragile, Gate, Host

Hosts = Callable[..., Host]


class Moving:
    """A resolver whose answer the test chooses."""

    def __init__(self, *urls: str) -> None:
        self.urls = list(urls)
        self.asked = 0

    def resolve(self, name: str) -> list[str]:
        self.asked += 1
        return list(self.urls)


def calculator(resolver: object, **options: float) -> RpcClient[Calculator]:
    return RpcClient(resolver, Calculator, RpcOptions(**({"timeout": PATIENCE_S} | options)), name="calculator")  # type: ignore[arg-type]


def test_a_server_that_comes_back_on_another_port_is_found_by_a_client_in_the_middle_of_its_work(
    host: Hosts, metadata: MetadataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIPPER_NAMESPACE", "moving")
    first = host(metadata=metadata.address, label="first", lease_s=30)  # its registration outlives it
    client = calculator(MetadataResolver(metadata.address), retries=3)
    assert client.label.sync() == client.label().get(PATIENCE_S) == "first"
    first.kill()
    second = host(metadata=metadata.address, label="second")
    assert second.port != first.port
    assert client.label.sync() == client.label().get(PATIENCE_S) == "second"
    assert client.add.sync(1) == 3


def test_a_call_that_must_not_run_twice_is_not_lost_to_a_server_that_had_gone_before(
    host: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skipper.control.rpc.backends.QUIET_S", 0.0)
    first, second = host(label="first"), host(label="second")
    moving = Moving(first.url())
    client = calculator(moving, retries=1)
    assert client.add.sync(1) == client.add(1).get(PATIENCE_S) == 3
    first.kill()
    moving.urls = [second.url()]
    assert client.add.sync(1) == client.add(1).get(PATIENCE_S) == 3
    second.kill()
    third = host(port=second.port)
    assert third.port == second.port
    assert client.add(1).get(PATIENCE_S) == client.counted.sync() + 2 == 3


@pytest.mark.parametrize(("is_same_port", "retries"), [(False, 2), (True, 0)])
def test_a_server_that_is_killed_and_replaced_between_two_calls_costs_none(
    host: Hosts, is_same_port: bool, retries: int
) -> None:
    first = host(label="first")
    moving = Moving(first.url())
    client = calculator(moving, retries=retries)
    spare = None if is_same_port else host(label="second")
    for call in (lambda: client.add.sync(1), lambda: client.add(1).get(PATIENCE_S)):
        assert call() == 3  # so it has been heard of in this very moment
        first.kill()
        second = spare or host(port=first.port, label="second")
        moving.urls = [second.url()]
        assert call() == 3
        assert client.counted.sync() == 1
        first, spare = second, None if is_same_port else host(label="third")


def test_without_retries_the_first_failure_is_told_and_the_next_call_finds_the_way(host: Hosts) -> None:
    first, second = host(label="first"), host(label="second")
    moving = Moving(first.url())
    client = calculator(moving)
    assert client.label.sync() == "first"
    first.kill()
    with pytest.raises(UnreachableError):
        client.label.sync()
    moving.urls = [second.url()]
    assert client.label.sync() == "second"


def test_as_many_attempts_are_made_as_are_allowed() -> None:
    for retries in (0, 1, 3):
        moving = Moving("actor://127.0.0.1:1/calculator")
        with pytest.raises(UnreachableError):
            calculator(moving, retries=retries).label.sync()
        assert moving.asked == 1 + retries
        with pytest.raises(UnreachableError):
            calculator(moving, retries=retries).label().get(PATIENCE_S)


def test_retries_end_with_the_time_of_the_call() -> None:
    client = calculator(Moving("actor://127.0.0.1:1/calculator"), retries=10_000, timeout=0.5)
    for call in (client.label.sync, lambda: client.label().get(PATIENCE_S)):
        with pytest.raises(DeadlineError) as raised:
            call()
        assert isinstance(raised.value.__cause__, UnreachableError)


def test_a_call_that_may_have_run_is_made_again_only_where_that_is_safe(host: Hosts, tmp_path: Path) -> None:
    record = tmp_path / "runs"
    for retries in (0, 3):
        doomed, spare = host(path=str(record)), host(path=str(record))
        client = RpcClient(
            FixedResolver(doomed.url("fragile"), spare.url("fragile")), Fragile, RpcOptions(PATIENCE_S, retries)
        )
        record.write_text("")
        with pytest.raises(ConnectionLostError):
            client.die.sync()
        assert record.read_text() == "x"
    record.write_text("")
    pair = [host(path=str(record)) for _ in range(2)]
    urls = [each.url("fragile") for each in pair]
    client = RpcClient(FixedResolver(*urls), Fragile, RpcOptions(PATIENCE_S, 3))
    assert "survived" in client.die_once().get(PATIENCE_S)
    assert record.read_text() == "xx"


def test_a_call_to_an_actor_that_was_replaced_reaches_its_successor_only_if_it_may_be_made_again() -> None:
    with ActorServer("127.0.0.1", 0) as server:
        server.register("calculator", Calculator("first"))
        client = client_of(server.address, Calculator, "calculator")
        assert client.label.sync() == "first"
        server.register("calculator", Calculator("second"), replace=True)
        with pytest.raises(HandleExpiredError):
            client.label.sync()
        assert client.label.sync() == "second"
        server.register("calculator", Calculator("third"), replace=True)
        assert client.with_options(retries=1).label().get(PATIENCE_S) == "third"


def test_a_handle_is_never_answered_by_a_successor(host: Hosts) -> None:
    first = host(label="first")
    client = client_of(first.address, Calculator, "calculator")
    handle = client.pin()
    pinned = RpcClient(handle, Calculator, RpcOptions(PATIENCE_S, retries=5))
    assert (handle.url, pinned.label.sync()) == (first.url(), "first")
    first.kill()
    with pytest.raises(RpcError):
        pinned.with_options(retries=0).add.sync(1)
    host(port=first.port, label="second")
    for call in (pinned.label.sync, lambda: pinned.label().get(PATIENCE_S)):
        with pytest.raises(HandleExpiredError):
            call()
    assert client.with_options(retries=3).label.sync() == "second"


def test_calls_are_spread_over_the_servers_of_a_name() -> None:
    servers = [ActorServer("127.0.0.1", 0).start() for _ in range(3)]
    gates = [Gate() for _ in servers]
    for server, gate in zip(servers, gates, strict=True):
        server.register("gate", gate, concurrency=10)
    client = RpcClient(
        FixedResolver(*(f"actor://{server.address}/gate" for server in servers)), Gate, RpcOptions(PATIENCE_S)
    )
    client.pin()
    wait_until(lambda: all(each.is_ready for each in client._backends._known.values()), "all are connected")
    futures = [client.wait(number) for number in range(9)]
    wait_until(lambda: [gate.inside for gate in gates] == [3, 3, 3], "each has three of the calls")
    for gate in gates:
        gate.let_go()
    assert sorted(future.get(PATIENCE_S) for future in futures) == list(range(9))
    for server in servers:
        server.stop()


def test_a_dead_server_of_several_costs_no_call_that_is_idempotent(host: Hosts) -> None:
    hosts = [host(label=str(number)) for number in range(3)]
    client = calculator(FixedResolver(*(each.url() for each in hosts)), retries=3)
    seen = {client.label.sync() for _ in range(30)}
    assert len(seen) >= 2
    hosts[0].kill()
    assert {client.label().get(PATIENCE_S) for _ in range(30)} == {"1", "2"}


def test_new_servers_of_a_name_are_found_beside_the_calls(host: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipper.control.rpc.backends.REFRESH_S", 0.05)
    first, second = host(label="first"), host(label="second")
    moving = Moving(first.url())
    client = calculator(moving)
    assert client.label.sync() == "first"
    moving.urls = [first.url(), second.url()]
    wait_until(lambda: client.label.sync() == "second", "a call has reached the second")
    moving.urls = [second.url()]
    wait_until(lambda: client.label.sync() == "second" and len(client._backends._known) == 1, "the first is forgotten")


def test_a_frozen_server_holds_a_call_up_to_its_deadline_and_answers_when_it_thaws(host: Hosts) -> None:
    frozen = host()
    client = calculator(FixedResolver(frozen.url()), timeout=0.4)
    assert client.with_options(timeout=PATIENCE_S).add.sync(1) == 3
    frozen.signal(SIGSTOP)
    for call in (lambda: client.add.sync(1), lambda: client.add(1).get(PATIENCE_S)):
        with pytest.raises(DeadlineError):
            call()
    frozen.signal(SIGCONT)
    assert client.with_options(timeout=PATIENCE_S).add.sync(1) == 3


def test_a_call_without_a_timeout_waits_for_a_frozen_server_no_longer_than_the_bound(
    host: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skipper.control.rpc.wire.channel.SILENCE_MS", 400)
    frozen = host()
    client = RpcClient(FixedResolver(frozen.url()), Calculator)
    assert client.add.sync(1) == 3
    frozen.signal(SIGSTOP)
    with pytest.raises(ConnectionLostError, match="timeout"):
        client.add(1).get(PATIENCE_S)


def test_a_server_that_is_frozen_from_the_beginning_is_passed_over(
    host: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skipper.control.rpc.backends.CONNECT_TIMEOUT_S", 0.3)
    frozen, sound = host(label="frozen"), host(label="sound")
    frozen.signal(SIGSTOP)
    client = calculator(FixedResolver(frozen.url(), sound.url()))
    assert {client.label.sync() for _ in range(5)} == {"sound"}


def test_a_killed_server_ends_the_calls_that_wait_for_it_at_once(host: Hosts) -> None:
    doomed = host()
    client = calculator(FixedResolver(doomed.url()), timeout=1000)
    client.add.sync(1)
    waiting = client.add_later(1, right=2, after_s=PATIENCE_S)
    wait_until(lambda: _is_late(client), "the actor is busy with it")
    doomed.signal(SIGKILL)
    with pytest.raises(ConnectionLostError, match="UNAVAILABLE"):
        waiting.get(PATIENCE_S)
    with pytest.raises(UnreachableError):
        client.add.sync(1)


def _is_late(client: RpcClient[Calculator]) -> bool:
    """Whether the actor, which handles one call at a time, does not come to another."""
    try:
        client.with_options(timeout=0.2).add.sync(1)
    except DeadlineError:
        return True
    return False


@pytest.fixture(params=["silence", "garbage", "hangs up", "http"])
def impostor(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of something that is no actor server."""
    listening = socket.create_server(("127.0.0.1", 0))
    taken: list[socket.socket] = []

    def answer() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            if request.param == "hangs up":
                connection.close()
                continue
            taken.append(connection)
            if request.param == "garbage":
                connection.sendall(bytes(range(256)) * 64)
            if request.param == "http":
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    yield f"127.0.0.1:{listening.getsockname()[1]}"
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join(PATIENCE_S)
    for connection in taken:
        connection.close()


def test_something_else_on_the_port_is_no_server_and_holds_nobody_up(
    impostor: str, host: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skipper.control.rpc.backends.CONNECT_TIMEOUT_S", 0.5)
    client = client_of(impostor, Calculator, "calculator")
    begin = time.monotonic()
    with pytest.raises(UnreachableError, match="no actor server answers"):
        client.add.sync(1)
    assert time.monotonic() - begin < PATIENCE_S / 2
    sound = host()
    both = calculator(FixedResolver(f"actor://{impostor}/calculator", sound.url()))
    assert both.add.sync(1) == 3


def test_garbage_sent_to_a_server_harms_nobody(server: ActorServer, client: RpcClient[Calculator]) -> None:
    host, _, port = server.address.rpartition(":")
    for garbage in (
        b"",
        b"\x00" * 1000,
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 5000,
    ):
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            connection.sendall(garbage)
    assert client.add.sync(1) == 3


def test_a_name_that_lasts_longer_than_its_server_is_not_held_against_the_others(
    host: Hosts, metadata: MetadataServer
) -> None:
    with MetadataMapping(metadata.address, namespace="stale") as mapping:
        mapping.register("calculator", "actor://127.0.0.1:1/calculator")
        sound = host(label="sound", env={"SKIPPER_NAMESPACE": "stale"})
        mapping.register("calculator", sound.url())
        mapping.register("calculator", sound.url("of-another-name"))
        client = calculator(MetadataResolver(metadata.address, namespace="stale"))
        assert {client.label.sync() for _ in range(10)} == {"sound"}
    with pytest.raises(NameNotFoundError):
        client_of(sound.address, Calculator, "of-another-name").label.sync()
