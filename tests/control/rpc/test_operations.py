"""Calls that take long: started, polled, cancelled."""

import time
from collections.abc import Callable

import pytest

from skipper.control import ActorError, BackpressureError, DeadlineError
from skipper.control.model.errors import NameNotFoundError, OperationCancelledError, OperationNotFoundError, RpcError
from skipper.control.rpc import ActorServer, RpcOptions, operations
from skipper.control.rpc.operations import KEPT_S, Operations
from skipper.control.rpc.scope import Scope
from skipper.control.rpc.wire.messages import CallResult, Code, MethodCall, OperationQuery, OperationState, Start
from tests.control.conftest import wait_until
from tests.control.rpc.conftest import OPTIONS, client_of
from tests.control.rpc.parties import PATIENCE_S, Calculator, Gate, Host, NotCallable, Patient


def test_an_operation_goes_on_without_a_call_that_waits_for_it(server: ActorServer) -> None:
    gate = Gate()
    server.register("gate", gate, concurrency=2)
    client = client_of(server.address, Gate, "gate")
    operation = client.wait.start(7).get(PATIENCE_S)
    assert operation.poll().get(PATIENCE_S) is False
    assert operation.poll(wait_s=0.05).get(PATIENCE_S) is False
    with pytest.raises(DeadlineError, match="goes on"):
        operation.result(timeout=0.1).get(PATIENCE_S)
    result = operation.result()
    client.let_go.sync()
    assert result.get(PATIENCE_S) == operation.result().get(PATIENCE_S) == 7
    assert operation.poll(wait_s=PATIENCE_S).get(PATIENCE_S) is True
    assert operation.cancel().get(PATIENCE_S) is False
    assert operation.result().get(PATIENCE_S) == 7
    server.unregister("gate")


def test_an_operation_that_fails_raises_where_its_result_is_asked_for(server: ActorServer) -> None:
    client = client_of(server.address, Calculator, "calculator")
    operation = client.fail.start("late").get(PATIENCE_S)
    with pytest.raises(ActorError) as raised:
        operation.result().get(PATIENCE_S)
    assert isinstance(raised.value.cause, NotCallable)
    with pytest.raises(TypeError):
        client.fail.start()
    with pytest.raises(NameNotFoundError):
        client_of(server.address, Calculator, "nobody").add.start(1).get(PATIENCE_S)


@pytest.mark.parametrize("method", ["wait_until_cancelled", "wait_in_vain"])
def test_a_cancelled_operation_ends_at_once_and_its_method_learns_of_it(server: ActorServer, method: str) -> None:
    patient = Patient()
    server.register("patient", patient)
    operation = getattr(client_of(server.address, Patient, "patient"), method).start().get(PATIENCE_S)
    assert patient.started.wait(PATIENCE_S)
    waiting = operation.result()
    assert operation.cancel().get(PATIENCE_S) is True
    assert patient.noticed.wait(PATIENCE_S)
    for result in (waiting, operation.result()):
        with pytest.raises(OperationCancelledError):
            result.get(PATIENCE_S)
    assert operation.cancel().get(PATIENCE_S) is False
    server.unregister("patient")


def test_one_that_is_cancelled_before_its_turn_never_runs(server: ActorServer) -> None:
    gate = Gate()
    server.register("gate", gate)
    client = client_of(server.address, Gate, "gate")
    first = client.wait.start(1).get(PATIENCE_S)
    wait_until(lambda: gate.inside == 1, "the first runs")
    second = client.wait.start(2).get(PATIENCE_S)
    assert second.cancel().get(PATIENCE_S) is True
    gate.let_go()
    assert first.result().get(PATIENCE_S) == 1
    assert client.wait.sync(3) == 3
    assert gate.order == [1, 3]
    server.unregister("gate")


def test_the_end_of_a_server_ends_its_operations(host: Callable[..., Host]) -> None:
    doomed = host()
    client = client_of(doomed.address, Calculator, "calculator", RpcOptions(PATIENCE_S, retries=1))
    operation = client.add_later.start(1, right=2, after_s=PATIENCE_S).get(PATIENCE_S)
    waiting = operation.result()
    doomed.kill()
    with pytest.raises(RpcError):
        waiting.get(PATIENCE_S)
    host(port=doomed.port)
    with pytest.raises(OperationNotFoundError):
        operation.result().get(PATIENCE_S)


def test_stopping_a_server_cancels_what_runs_there() -> None:
    patient = Patient()
    server = ActorServer("127.0.0.1", 0).start()
    server.register("patient", patient)
    client_of(server.address, Patient, "patient", OPTIONS).wait_until_cancelled.start().get(PATIENCE_S)
    assert patient.started.wait(PATIENCE_S)
    server.stop()
    assert patient.noticed.wait(PATIENCE_S)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


CALL = MethodCall("method", (b"",))


def ended(table: Operations, name: str) -> OperationState:
    return table.poll(OperationQuery(name, PATIENCE_S), None)


def test_the_same_id_again_starts_nothing() -> None:
    runs: list[Scope] = []

    def run(call: MethodCall, scope: Scope) -> CallResult:
        runs.append(scope)
        return CallResult((b"done",))

    table = Operations(run)
    for _ in range(3):
        table.start(Start("one", CALL))
        assert ended(table, "one").answer == CallResult((b"done",))
    assert len(runs) == 1


def test_results_are_kept_for_a_time_and_running_ones_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    def run(call: MethodCall, scope: Scope) -> CallResult:
        deadline = time.monotonic() + PATIENCE_S
        while call.method == "long" and not scope.is_cancelled and time.monotonic() < deadline:
            time.sleep(0.005)
        return CallResult((b"done",))

    table = Operations(run, clock=clock)
    table.start(Start("one", CALL))
    assert ended(table, "one").answer is not None
    clock.now = KEPT_S - 1
    assert ended(table, "one").answer is not None
    clock.now = KEPT_S + 1
    missing = ended(table, "one").failure
    assert missing is not None
    assert missing.code is Code.NO_SUCH_OPERATION
    monkeypatch.setattr(operations, "MAX_RUNNING", 2)
    monkeypatch.setattr(operations, "MAX_KEPT", 3)
    for name in ("a", "b"):
        assert table.start(Start(name, MethodCall("long", (b"",)))).failure is None
    refused = table.start(Start("c", CALL)).failure
    assert refused is not None
    assert refused.code is Code.BUSY
    table.cancel_all()
    wait_until(lambda: table._running == 0, "both have noticed")
    for name in ("d", "e", "f", "g"):  # the ended ones make room, the oldest first
        assert table.start(Start(name, CALL)).failure is None
        assert ended(table, name).answer is not None
    assert ended(table, "a").failure is not None
    assert set(table._operations) == {"e", "f", "g"}


def test_a_busy_server_says_so(server: ActorServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MAX_RUNNING", 0)
    client = client_of(server.address, Calculator, "calculator")
    with pytest.raises(BackpressureError):
        client.add.start(1).get(PATIENCE_S)
