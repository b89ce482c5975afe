"""Numbers that nobody means, handed to everything of naming that takes one, and what a peer may send."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from skipper.control import Actor, ControlError, Future, Settings, ValueMesh
from skipper.control.api.service import ServiceOptions
from skipper.control.model.shape import Extent
from skipper.control.rpc import ActorServer, FixedResolver, MetadataMapping, MetadataResolver, RpcClient, RpcOptions
from skipper.control.rpc.operations import Operations
from skipper.control.rpc.urls import ServiceUrl
from skipper.control.rpc.wire.messages import CallResult, OperationQuery, Start
from skipper.control.rpc.wire.messages import MethodCall as Request
from skipper.torchstore import serve_metrics
from tests.control.rpc.parties import PATIENCE_S, Calculator
from tests.numbers import NOT_NUMBERS, STRANGE, refused_well

A_SERVER = "127.0.0.1:1"


class Nobody(Actor):
    pass


def serve(*args: Any, grace_s: Any = 0, **kwargs: Any) -> None:
    ActorServer(*args, **kwargs).start().stop(grace_s=grace_s)


def register(server: ActorServer, **kwargs: Any) -> None:
    server.register("other", Calculator(), **kwargs)
    server.unregister("other")


Use = Callable[[ActorServer, RpcClient[Calculator], Any], object]
CALLS: dict[str, Use] = {
    "Future.get": lambda server, client, value: client.add(1).get(value),
    "Future.exception": lambda server, client, value: client.add(1).exception(value),
    "with_options, timeout": lambda server, client, value: client.with_options(timeout=value).add.sync(1),
    "with_options, timeout of a future": lambda server, client, value: (
        client.with_options(timeout=value).add(1).get(PATIENCE_S)
    ),
    "RpcOptions, retries": lambda server, client, value: RpcOptions(retries=value),
    "RpcClient, max_message_nbytes": lambda server, client, value: RpcClient(
        FixedResolver(f"actor://{server.address}/calculator"), Calculator, max_message_nbytes=value
    ),
    "pin": lambda server, client, value: client.pin(timeout=value),
    "poll": lambda server, client, value: client.add.start(1).get(PATIENCE_S).poll(wait_s=value).get(PATIENCE_S),
    "result": lambda server, client, value: client.add.start(1).get(PATIENCE_S).result(timeout=value).get(PATIENCE_S),
    "ActorServer, host": lambda server, client, value: serve(value, 0),
    "ActorServer, port": lambda server, client, value: serve("127.0.0.1", value),
    "ActorServer, max_message_nbytes": lambda server, client, value: serve("127.0.0.1", 0, max_message_nbytes=value),
    "ActorServer.stop": lambda server, client, value: serve("127.0.0.1", 0, grace_s=value),
    "register, concurrency": lambda server, client, value: register(server, concurrency=value),
    "MetadataMapping, lease_s": lambda server, client, value: MetadataMapping(A_SERVER, lease_s=value).close(),
    "MetadataResolver, timeout": lambda server, client, value: MetadataResolver(A_SERVER, timeout=value).close(),
    "MetadataResolver, address": lambda server, client, value: MetadataResolver(f"127.0.0.1:{value}").close(),
    "ServiceUrl, port": lambda server, client, value: ServiceUrl("actor", "host", value),
    "ServiceUrl.parse": lambda server, client, value: ServiceUrl.parse(f"actor://host:{value}/name"),
    "serve_metrics, port": lambda server, client, value: serve_metrics(value).close(),
    "Extent": lambda server, client, value: Extent.of({"axis": value}),
    "Extent.point": lambda server, client, value: Extent.of({"axis": 4}).point(value),
    "Extent.rank_of": lambda server, client, value: Extent.of({"axis": 4}).rank_of({"axis": value}),
    "ValueMesh.item": lambda server, client, value: ValueMesh({"axis": 2}, [1, 2]).item(axis=value),
    "ValueMesh": lambda server, client, value: ValueMesh({"axis": value}, [1, 2]),
}
for field in dataclasses.fields(Settings):
    CALLS[f"Settings, {field.name}"] = lambda server, client, value, name=field.name: Settings(**{name: value})  # type: ignore[misc]
for field in dataclasses.fields(ServiceOptions):
    CALLS[f"options, {field.name}"] = lambda server, client, value, name=field.name: Nobody.options(**{name: value})  # type: ignore[misc]


@pytest.mark.parametrize("name", CALLS)
def test_strange_numbers_are_refused_in_words(server: ActorServer, client: RpcClient[Calculator], name: str) -> None:
    for value in STRANGE:
        refused_well(lambda value: CALLS[name](server, client, value), value, ControlError, LookupError)


def test_what_is_no_time_is_no_bound() -> None:
    for value in NOT_NUMBERS:
        with pytest.raises((ValueError, TypeError), match="timeout"):
            Future[int]().get(value)
        for name in ("heartbeat_s", "send_timeout_s"):
            with pytest.raises((ValueError, TypeError), match=name):
                Settings(**{name: value})


def test_a_wait_of_a_peers_that_is_no_number_is_none() -> None:
    operations = Operations(lambda call, scope: CallResult((b"",)))
    operations.start(Start("id", Request("method", ())))
    for wait_s in (float("nan"), -1e308, -float("inf"), 0.0):
        assert operations.poll(OperationQuery("id", wait_s), None).failure is None
