"""Calls by name: what comes back, what raises, and how they are made."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from skipper.control import ActorError, ControlError, DeadlineError, Future, PayloadError
from skipper.control.model.errors import MessageTooLargeError, NameNotFoundError, NoSuchMethodError, UnreachableError
from skipper.control.rpc import ActorServer, FixedResolver, RpcClient, RpcMethod, RpcOptions
from tests.control.rpc.conftest import client_of
from tests.control.rpc.parties import PATIENCE_S, Calculator, Gate, NotCallable, Patient, Relay
from tests.sameness import assert_same

Client = RpcClient[Calculator]


def test_a_call_has_a_form_for_threads_and_one_for_event_loops(client: Client) -> None:
    async def call() -> list[int]:
        one = await client.add(1, right=2)
        return [one, *await asyncio.gather(*(client.add(number) for number in range(20)))]

    assert client.add(1).get(PATIENCE_S) == 3
    assert client.add.sync(1, 5) == 6
    assert asyncio.run(call()) == [3, *range(2, 22)]


def test_plain_async_and_static_methods_are_called_alike(client: Client) -> None:
    assert client.add_later(1, right=2).get(PATIENCE_S) == 3
    assert client.double.sync(4) == 8


def test_many_threads_call_at_a_time(client: Client) -> None:
    results: list[int] = []

    def call() -> None:
        results.extend(client.add.sync(number, 0) for number in range(20))

    threads = [threading.Thread(target=call) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(results) == sorted(list(range(20)) * 16)


def test_what_a_method_raises_is_raised_with_its_traceback_and_the_actor_lives_on(client: Client) -> None:
    with pytest.raises(ActorError, match=r"calculator\.fail raised") as raised:
        client.fail("on purpose").get(PATIENCE_S)
    assert isinstance(raised.value.cause, NotCallable)
    assert raised.value.cause.args == ("on purpose",)
    assert raised.value.__cause__ is raised.value.cause
    assert "raise NotCallable(words)" in raised.value.remote_traceback
    with pytest.raises(ActorError, match="SystemExit: 3"):
        client.quit.sync()
    assert client.add.sync(1) == 3


def test_an_exception_that_cannot_travel_leaves_its_description(client: Client) -> None:
    with pytest.raises(ActorError, match="it has a lock") as raised:
        client.fail_with_lock.sync()
    assert raised.value.cause is None


def test_arguments_that_do_not_fit_are_refused_before_anything_is_sent(client: Client) -> None:
    before = client.counted.sync()
    for args, kwargs in (((), {}), ((1, 2, 3), {}), ((1,), {"wrong": 2})):
        with pytest.raises(TypeError):
            client.add(*args, **kwargs)
    with pytest.raises(PayloadError, match="cannot pickle"):
        client.echo(threading.Lock())
    assert client.counted.sync() == before


def test_a_result_that_cannot_travel_is_an_error_of_its_caller(client: Client) -> None:
    with pytest.raises(PayloadError, match=r"calculator.give_lock: the result.*lock"):
        client.give_lock.sync()


def test_only_public_methods_can_be_called(client: Client, server: ActorServer) -> None:
    for name in ("_private", "kind", "unheard_of", "__len__"):
        with pytest.raises(AttributeError):
            getattr(client, name)

    class Impostor:
        def _private(self) -> None: ...
        def kind(self) -> None: ...
        def unheard_of(self) -> None: ...

    stranger = client_of(server.address, Impostor, "calculator")
    with pytest.raises(NoSuchMethodError, match="unheard_of"):
        stranger.unheard_of.sync()
    with pytest.raises(NoSuchMethodError, match="kind"):
        stranger.kind.sync()
    with pytest.raises(AttributeError):
        stranger._private  # noqa: B018


def test_a_method_with_the_name_of_the_clients_own_is_reached_by_hand(client: Client) -> None:
    assert RpcMethod(client, "close", RpcOptions(timeout=PATIENCE_S), Calculator)().get(PATIENCE_S) == "closed"
    assert client.add.sync(1) == 3


def test_arrays_come_back_whole_and_writable(client: Client) -> None:
    array = np.arange(100_000, dtype=np.float32).reshape(100, 1000)[:, ::2]
    back = client.echo.sync({"array": array})["array"]
    assert_same(back.tobytes(), array.tobytes())
    back[0, 0] = -1


def test_a_message_beyond_the_limit_is_refused_on_either_way(server: ActorServer, client: Client) -> None:
    small = client_of(server.address, Calculator, "calculator", max_message_nbytes=1 << 20)
    with pytest.raises(MessageTooLargeError, match="max_message_nbytes"):
        small.echo(bytes(1 << 21)).get(PATIENCE_S)
    assert len(small.echo.sync(bytes(1 << 19))) == 1 << 19
    with ActorServer("127.0.0.1", 0, max_message_nbytes=1 << 20) as narrow:
        narrow.register("calculator", Calculator())
        wide = client_of(narrow.address, Calculator, "calculator")
        with pytest.raises(MessageTooLargeError):
            wide.echo.sync(bytes(1 << 21))
        with pytest.raises(PayloadError, match="max_message_nbytes"):
            wide.echo.sync(Repeat(1 << 21))
        assert wide.add.sync(1) == 3


class Repeat:
    """Small on its way there, large on its way back."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (self.nbytes,)


def test_the_time_of_a_call_is_bounded(server: ActorServer) -> None:
    gate = Gate()
    server.register("gate", gate)
    client = client_of(server.address, Gate, "gate")
    begin = time.monotonic()
    with pytest.raises(DeadlineError):
        client.with_options(timeout=0.2).wait().get(PATIENCE_S)
    with pytest.raises(TimeoutError):
        client.with_options(timeout=0.2).wait.sync()
    assert time.monotonic() - begin < PATIENCE_S / 2
    gate.let_go()
    assert client.wait.sync(7) == 7
    server.unregister("gate")


def test_an_async_method_is_cancelled_when_its_time_is_up(server: ActorServer) -> None:
    patient = Patient()
    server.register("patient", patient)
    client = client_of(server.address, Patient, "patient", RpcOptions(timeout=0.3))
    with pytest.raises(DeadlineError):
        client.wait_in_vain.sync()
    assert patient.noticed.wait(PATIENCE_S)
    server.unregister("patient")


@pytest.fixture
def relay(server: ActorServer) -> Iterator[RpcClient[Relay]]:
    server.register("patient", Patient())
    server.register("relay", Relay(lambda: client_of(server.address, Patient, "patient", RpcOptions(timeout=1000))))
    yield client_of(server.address, Relay, "relay")
    server.unregister("patient")
    server.unregister("relay")


@pytest.mark.parametrize("method", ["left_there", "left_there_async"])
def test_a_call_within_a_call_has_what_is_left_of_its_time(relay: RpcClient[Relay], method: str) -> None:
    for timeout, bound in ((5.0, 5.0), (None, 1000.0)):
        left = getattr(relay.with_options(timeout=timeout), method)().get(PATIENCE_S)
        assert bound - 5 < left < 1.02 * bound  # gRPC rounds long ones up on the wire


def test_without_a_timeout_there_is_no_deadline(server: ActorServer) -> None:
    server.register("patient", Patient())
    assert client_of(server.address, Patient, "patient", RpcOptions()).left.sync() is None
    server.unregister("patient")


def test_options_are_checked_and_belong_to_the_client_that_was_given_them(client: Client) -> None:
    other = client.with_options(timeout=3, retries=2)
    assert other._options == RpcOptions(3, 2) != client._options
    assert other._backends is client._backends
    for wrong in ({"timeout": 0}, {"timeout": -1}, {"retries": -1}, {"retries": 1.5}):
        with pytest.raises(ValueError, match=r"timeout|retries"):
            client.with_options(**wrong)
    with pytest.raises(TypeError):
        client.with_options(patience=1)


def test_the_name_is_that_of_the_class_where_none_is_given(server: ActorServer) -> None:
    server.register("Calculator", Calculator("by class"))
    resolver = FixedResolver({"Calculator": f"actor://{server.address}/Calculator"})
    assert RpcClient(resolver, Calculator).label.sync() == "by class"
    server.unregister("Calculator")


def test_a_name_that_leads_nowhere_is_told_from_a_server_that_is_not_there(server: ActorServer, client: Client) -> None:
    with pytest.raises(NameNotFoundError, match="nobody"):
        client_of(server.address, Calculator, "nobody").add.sync(1)
    with pytest.raises(NameNotFoundError):
        RpcClient(FixedResolver({"a": "actor://127.0.0.1:1/a"}), Calculator, name="b").add(1).get(PATIENCE_S)
    with pytest.raises(NameNotFoundError, match=r"only grpc://"):
        RpcClient(FixedResolver("grpc://127.0.0.1:1/a"), Calculator).add.sync(1)
    with pytest.raises(UnreachableError):
        client_of("127.0.0.1:1", Calculator, "calculator").add.sync(1)


def test_a_resolver_of_a_users_may_fail_as_it_likes(server: ActorServer) -> None:
    class Broken:
        def resolve(self, name: str) -> list[str]:
            raise OSError("no such table")

    with pytest.raises(ControlError, match="no such table"):
        RpcClient(Broken(), Calculator).add(1).get(PATIENCE_S)


def test_a_closed_client_calls_nobody(server: ActorServer) -> None:
    gate = Gate()
    server.register("gate", gate)
    client = client_of(server.address, Gate, "gate", RpcOptions(retries=1))
    opened = client.let_go()
    assert isinstance(opened, Future)
    assert opened.get(PATIENCE_S) is None
    assert client.wait.sync(1) == 1
    client.close()
    for call in (lambda: client.wait(1).get(PATIENCE_S), lambda: client.wait.sync(1)):
        with pytest.raises(UnreachableError):
            call()
    server.unregister("gate")
