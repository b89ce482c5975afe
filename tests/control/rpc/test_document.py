"""The forms of the document on actors and resolvers, block by block, with its names."""

import asyncio
import dataclasses
import inspect
from collections.abc import Awaitable
from typing import Any, Protocol, get_type_hints

import pytest

from skipper.control.rpc import (
    ActorServer,
    ChainResolver,
    FixedResolver,
    GcsResolver,
    MetadataMapping,
    MetadataResolver,
    MetadataServer,
    RpcClient,
    RpcMethod,
    RpcOptions,
)
from skipper.control.rpc import NameMapping as OurNameMapping
from skipper.control.wire._generated import actor_service_pb2 as pb
from tests.control.rpc.parties import PATIENCE_S


class ActorClass:
    def method_a(self, arg1: int, arg2: str) -> int:
        return arg1 * len(arg2)


class NameMapping:
    """What the document leaves to the cluster controller."""

    def __init__(self) -> None:
        self.registered: list[tuple[str, str]] = []

    def register(self, name: str, target_url: str) -> None:
        self.registered.append((name, target_url))

    def resolve(self, name: str) -> list[str]:
        return [url for registered, url in self.registered if registered == name]


def test_resolvers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GcsResolver, "_running", lambda self: [Machine()])
    resolver = GcsResolver()
    assert resolver.resolve("fluster-controller") == ["grpc://10.0.0.2:7000/controller"]
    three_types = (MetadataResolver, GcsResolver, FixedResolver)
    assert all(hasattr(each, "resolve") for each in (*three_types, ChainResolver))


class Machine:
    """As little of a machine as the resolver needs; `test_gcs` has what Google's library makes of the API."""

    class tags:  # noqa: N801
        items = ("fluster-controller",)

    class metadata:  # noqa: N801
        class item:  # noqa: N801
            key, value = "skipper-service-fluster-controller", "grpc://:7000/controller"

        items = (item,)

    class interface:  # noqa: N801
        network_i_p = "10.0.0.2"

    network_interfaces = (interface,)


def test_namespaces(metadata: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader's job id is the namespace of its tree, unless the namespace is named."""
    monkeypatch.setenv("SKIPPER_JOB_ID", "user-rl-leader-123")
    assert MetadataResolver(metadata.address).namespace == "user-rl-leader-123"
    assert ActorServer("127.0.0.1", 0).namespace == "user-rl-leader-123"
    monkeypatch.setenv("SKIPPER_NAMESPACE", "global")
    assert MetadataResolver(metadata.address).namespace == ActorServer("127.0.0.1", 0).namespace == "global"
    assert MetadataResolver(metadata.address, namespace="own").namespace == "own"
    assert ActorServer("127.0.0.1", 0, namespace="own").namespace == "own"
    monkeypatch.delenv("SKIPPER_NAMESPACE")
    with MetadataMapping(metadata.address) as mapping:
        tree = ("trainer/0", "rollout/0", "rollout/1", "inference/0", "inference/1")
        for port, name in enumerate(tree, 1):
            mapping.register(name, f"actor://127.0.0.1:{port}/{name}")
        names = MetadataResolver(metadata.address).names()
        assert sorted(names) == sorted(f"/user-rl-leader-123/{name}" for name in tree)
        for port, name in enumerate(tree, 1):
            mapping.unregister(name, f"actor://127.0.0.1:{port}/{name}")


def test_actors_and_actor_servers() -> None:
    host, port = "127.0.0.1", free_port()
    mapping = NameMapping()

    server = ActorServer(host, port, mapping)
    server.register("actor_name", ActorClass())
    server.start()

    try:
        assert issubclass(OurNameMapping, Protocol)  # type: ignore[arg-type]
        assert mapping.registered == [("actor_name", f"actor://{server.host}:{server.port}/actor_name")]
        assert (server.host, server.port, server.mapping) == (host, port, mapping)
        assert server.address == f"{host}:{port}"
        client = RpcClient(mapping, ActorClass, name="actor_name")
        assert client.method_a(2, "abc").get(PATIENCE_S) == 6
    finally:
        server.stop()


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def test_the_actor_service() -> None:
    request = {field.name: (field.number, field.type) for field in pb.ActorRequest.DESCRIPTOR.fields}
    text, data = pb.ActorRequest.DESCRIPTOR.fields_by_name["method"].type, 12
    assert request | {"actor_handle": (1, text), "method": (2, text), "args": (3, data)} == request
    result = pb.ActorResponse.DESCRIPTOR.fields_by_name["result"]
    assert (result.number, result.type) == (1, data)
    service = pb.DESCRIPTOR.services_by_name["ActorService"]
    for rpc, takes, gives in (
        ("Invoke", "ActorRequest", "ActorResponse"),
        ("ListMethods", "ListMethodsRequest", "ListMethodsResponse"),
        ("ListActors", "ListActorsRequest", "ListActorsResponse"),
    ):
        method = service.methods_by_name[rpc]
        assert (method.input_type.name, method.output_type.name) == (takes, gives)


def test_actor_client_and_name_resolution() -> None:
    assert [(field.name, field.default) for field in dataclasses.fields(RpcOptions)] == [
        ("timeout", None),
        ("retries", 0),
    ]
    assert get_type_hints(RpcOptions) == {"timeout": float | None, "retries": int}
    assert list(inspect.signature(RpcClient).parameters)[:3] == ["resolver", "cls", "options"]
    assert list(inspect.signature(RpcMethod).parameters) == ["client", "name", "options", "cls"]
    options = RpcOptions()
    assert options.copy() == options
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.retries = 1  # type: ignore[misc]

    mapping = NameMapping()
    with ActorServer("127.0.0.1", 0, mapping) as server:
        server.register("ActorClass", ActorClass())
        client: RpcClient[ActorClass] = RpcClient(mapping, ActorClass, RpcOptions())
        patient = client.with_options(timeout=PATIENCE_S, retries=2)
        assert isinstance(patient, RpcClient)
        with pytest.raises(AttributeError, match="ActorClass has no public method 'method_b'"):
            client.method_b  # noqa: B018
        method: RpcMethod[Any, int] = patient.method_a
        assert isinstance(method, RpcMethod)
        call = RpcMethod(client, "method_a", RpcOptions(timeout=PATIENCE_S), ActorClass)(1, arg2="x")
        assert isinstance(call, Awaitable)

        async def use() -> int:
            return await patient.method_a(3, "ab")  # type: ignore[no-any-return]

        assert (call.get(PATIENCE_S), asyncio.run(use())) == (1, 6)
