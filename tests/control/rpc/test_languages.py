"""What a client finds that has none of our Python: a stub generated from the proto, JSON, reflection, health."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from skipper.control.rpc import ActorServer, user_secret
from skipper.control.wire.regenerate import SOURCES
from tests.control.rpc.parties import PATIENCE_S, Calculator

CLIENT = Path(__file__).with_name("stub_client_script.py")


def test_a_generated_stub_and_an_hmac_are_all_that_another_language_needs(server: ActorServer, tmp_path: Path) -> None:
    generate = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={SOURCES}", f"--python_out={tmp_path}"]
    generate += [f"--grpc_python_out={tmp_path}", str(SOURCES / "actor_service.proto")]
    subprocess.run(generate, check=True, timeout=60)
    command = [sys.executable, str(CLIENT), server.address, user_secret.shared_secret().hex()]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        "calculator",
        "Calculator",
        ["(self, left: int, right: int = 2) -> int", "Add two numbers.", False, True],
        3,
        6,
        {"nested": [None, True, "text"]},
        [1, "tests.control.rpc.parties.NotCallable: words"],
        11,
        [10, "arguments are an array or an object"],
        2,
        4,
        [True, "42"],
        True,
        False,
    ]


@pytest.fixture(scope="module")
def open_server() -> Iterator[ActorServer]:
    with ActorServer("127.0.0.1", 0, allow_json=True) as server:
        server.register("calculator", Calculator())
        yield server


def test_a_tool_finds_out_by_reflection_how_to_call(open_server: ActorServer) -> None:
    """As grpcurl does it: nothing of ours is imported but the address."""
    with grpc.insecure_channel(open_server.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert set(database.get_services()) == {
            "skipper.control.v1.ActorService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        pool = descriptor_pool.DescriptorPool(database)
        service = pool.FindServiceByName("skipper.control.v1.ActorService")
        invoke = service.methods_by_name["Invoke"]
        request = message_factory.GetMessageClass(invoke.input_type)(
            actor="calculator", method="add", args=b'{"left": 40}', encoding=1
        )
        call = channel.unary_unary(
            f"/{service.full_name}/{invoke.name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=message_factory.GetMessageClass(invoke.output_type).FromString,
        )
        assert call(request, timeout=PATIENCE_S).result == b"42"


def test_health_is_told_to_anybody(server: ActorServer) -> None:
    own = ActorServer("127.0.0.1", 0).start()
    with grpc.insecure_channel(own.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "skipper.control.v1.ActorService"):
            status = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_S).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as raised:
            stub.Check(health_pb2.HealthCheckRequest(service="unheard.of"), timeout=PATIENCE_S)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        watched = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=PATIENCE_S)
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        own.stop()
        with pytest.raises(grpc.RpcError):
            stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        watched.cancel()


def test_what_is_no_message_is_refused(open_server: ActorServer) -> None:
    with grpc.insecure_channel(open_server.address) as channel:
        for name in ("Invoke", "ListActors", "OpenSession"):
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary(f"/skipper.control.v1.ActorService/{name}")(b"\xff\xff", timeout=PATIENCE_S)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
