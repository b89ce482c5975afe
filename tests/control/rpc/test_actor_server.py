"""A server's own life, and how its actors take their calls."""

import socket
import threading
import time
from typing import Any

import pytest

from skipper.control import BackpressureError, WireError
from skipper.control.model.errors import ConnectionLostError, HandleExpiredError, NameNotFoundError, RpcError
from skipper.control.rpc import ActorServer, actor_server
from skipper.control.rpc.wire.messages import Code, Query
from tests.control.conftest import wait_until
from tests.control.rpc.conftest import client_of
from tests.control.rpc.parties import PATIENCE_S, Calculator, Gate


def waiting_for_gate(server: ActorServer) -> int:
    """How many calls wait for the actor of that name."""
    hosted: Any = server._catalog.by_name("gate")
    return len(hosted._limit._waiting)


def test_an_actor_handles_one_call_at_a_time_in_the_order_in_which_they_came(server: ActorServer) -> None:
    gate = Gate()
    server.register("gate", gate)
    client = client_of(server.address, Gate, "gate")
    futures = [client.wait(0)]
    wait_until(lambda: gate.inside == 1, "the first has begun")
    for number in range(1, 6):
        futures.append(client.wait(number))
        wait_until(lambda number=number: waiting_for_gate(server) == number, "it waits")
    gate.let_go()
    assert [future.get(PATIENCE_S) for future in futures] == gate.order == list(range(6))
    assert gate.most == 1
    server.unregister("gate")


def test_an_actor_may_be_said_to_handle_several_calls_at_a_time(server: ActorServer) -> None:
    gate = Gate()
    server.register("gate", gate, concurrency=3)
    client = client_of(server.address, Gate, "gate")
    futures = [client.wait(number) for number in range(5)]
    wait_until(lambda: gate.inside == 3, "three have begun")
    gate.let_go()
    assert sorted(future.get(PATIENCE_S) for future in futures) == list(range(5))
    assert gate.most == 3
    with pytest.raises(ValueError, match="concurrency"):
        server.register("other", gate, concurrency=0)
    server.unregister("gate")


def test_actors_of_a_server_do_not_wait_for_each_other(server: ActorServer) -> None:
    gate = Gate()
    server.register("gate", gate)
    waiting = client_of(server.address, Gate, "gate").wait(1)
    wait_until(lambda: gate.inside == 1, "it has begun")
    assert client_of(server.address, Calculator, "calculator").add.sync(1) == 3
    assert not waiting.done()
    gate.let_go()
    assert waiting.get(PATIENCE_S) == 1
    server.unregister("gate")


def test_an_actor_that_falls_behind_turns_calls_away_which_may_be_made_again(
    server: ActorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_server, "_MAX_WAITING", 2)
    gate = Gate()
    server.register("gate", gate)
    client = client_of(server.address, Gate, "gate")
    waiting = [client.wait(number) for number in range(3)]
    wait_until(lambda: gate.inside == 1 and waiting_for_gate(server) == 2, "it is busy, and two wait")
    with pytest.raises(BackpressureError, match="too many calls wait"):
        client.wait.sync(3)
    patient = client.with_options(retries=100)
    late = [patient.wait(number) for number in range(10)]
    gate.let_go()
    assert sorted(each.get(PATIENCE_S) for each in waiting + late) == sorted([0, 1, 2, *range(10)])
    server.unregister("gate")


def test_names_are_taken_once_replaced_on_demand_and_free_again_afterwards(server: ActorServer) -> None:
    first = server.register("a", Calculator("first"))
    with pytest.raises(ValueError, match="already"):
        server.register("a", Calculator("second"))
    with pytest.raises(ValueError, match="already"):
        server.register("/a", Calculator("second"))
    second = server.register("a", Calculator("second"), replace=True)
    assert first != second
    assert client_of(server.address, Calculator, "a").label.sync() == "second"
    server.unregister("a")
    with pytest.raises(KeyError, match="no actor called 'a'"):
        server.unregister("a")
    with pytest.raises(NameNotFoundError):
        client_of(server.address, Calculator, "a").label.sync()
    with pytest.raises(ValueError, match="is not a name"):
        server.register("a name", Calculator())
    assert server._catalog.by_handle(first) is None
    assert server._catalog.by_handle(second) is None


def test_a_call_that_runs_when_its_actor_is_unregistered_ends_well(server: ActorServer) -> None:
    gate = Gate()
    server.register("gate", gate)
    client = client_of(server.address, Gate, "gate")
    waiting = client.wait(1)
    wait_until(lambda: gate.inside == 1, "it has begun")
    server.unregister("gate")
    gate.let_go()
    assert waiting.get(PATIENCE_S) == 1
    with pytest.raises((HandleExpiredError, NameNotFoundError)):
        client.wait.sync(2)


def test_methods_are_listed_with_what_a_caller_wants_to_know(server: ActorServer) -> None:
    methods = server.list_methods(Query(actor="calculator"))
    assert isinstance(methods, tuple)
    by_name = {each.name: each for each in methods}
    assert by_name["add"].signature == "(self, left: int, right: int = 2) -> int"
    assert by_name["add"].doc == "Add two numbers."
    assert (by_name["label"].is_idempotent, by_name["add"].is_idempotent) == (True, False)
    assert "kind" not in by_name
    assert not any(name.startswith("_") for name in by_name)
    missing = server.list_methods(Query(actor="nobody"))
    assert not isinstance(missing, tuple)
    assert missing.code is Code.NO_SUCH_ACTOR


def test_a_server_starts_once_and_stops_as_often_as_one_likes() -> None:
    server = ActorServer("127.0.0.1", 0)
    server.register("calculator", Calculator())
    with server as entered:
        assert entered is server
        assert server.port != 0
        with pytest.raises(RuntimeError, match="started only once"):
            server.start()
        assert repr(server) == f"<ActorServer {server.address}: calculator>"
    server.stop()
    for again in (server.start, lambda: server.register("b", Calculator())):
        with pytest.raises(RuntimeError):
            again()
    ActorServer("127.0.0.1", 0).stop()


def test_a_port_is_served_by_one_and_free_after_its_stop() -> None:
    with ActorServer("127.0.0.1", 0) as first, pytest.raises(WireError, match="cannot listen"):
        ActorServer("127.0.0.1", first.port).start()
    with ActorServer("127.0.0.1", first.port), socket.create_connection(("127.0.0.1", first.port), timeout=PATIENCE_S):
        pass


def test_stopping_waits_for_calls_that_run_and_takes_no_more() -> None:
    server = ActorServer("127.0.0.1", 0).start()
    gate = Gate()
    server.register("gate", gate)
    client = client_of(server.address, Gate, "gate")
    waiting = client.wait(1)
    wait_until(lambda: gate.inside == 1, "it has begun")
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    wait_until(lambda: server._listener._is_stopping, "it stops")
    with pytest.raises(RpcError, match=r"stopping|connect"):
        client.let_go.sync()
    gate.let_go()
    assert waiting.get(PATIENCE_S) == 1
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()


def test_a_method_that_never_ends_holds_up_no_stop() -> None:
    server = ActorServer("127.0.0.1", 0).start()
    gate = Gate()
    server.register("gate", gate)
    waiting = client_of(server.address, Gate, "gate").wait(1)
    wait_until(lambda: gate.inside == 1, "it has begun")
    begin = time.monotonic()
    server.stop(grace_s=0.1)
    assert time.monotonic() - begin < PATIENCE_S / 2
    with pytest.raises(ConnectionLostError):
        waiting.get(PATIENCE_S)
    gate.let_go()
