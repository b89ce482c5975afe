"""A client that knows the proto file, gRPC and HMAC, and nothing else: ``stub_client_script.py ADDRESS SECRET``.

The stub, which is generated from the proto file, is on ``$PYTHONPATH``. Prints what the server answers, as JSON.
"""

import hashlib
import hmac
import json
import os
import struct
import sys
from typing import Any

import actor_service_pb2 as pb  # type: ignore[import-not-found]
import actor_service_pb2_grpc as stubs  # type: ignore[import-not-found]
import grpc

address, secret = sys.argv[1], bytes.fromhex(sys.argv[2])
stub = stubs.ActorServiceStub(grpc.insecure_channel(address))


def mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(struct.pack("<Q", len(part)) + part for part in parts), hashlib.sha256).digest()


nonce = os.urandom(32)
opened = stub.OpenSession(pb.OpenSessionRequest(version=1, nonce=nonce))
assert opened.proof == mac(secret, b"skipper actors", b"server", nonce, opened.session)
key = mac(secret, b"skipper actors", b"key", nonce, opened.session)
count = 0


def ask(rpc: str, request: Any) -> Any:
    global count
    count += 1
    number = struct.pack("<Q", count)
    request.proof = opened.session + number + mac(key, b"request", rpc.encode(), number, request.SerializeToString())
    answer = getattr(stub, rpc)(request, timeout=20)
    proof, answer.proof = answer.proof, b""
    assert proof == mac(key, b"answer", rpc.encode(), number, answer.SerializeToString())
    return answer


def call(method: str, args: Any, **kwargs: Any) -> Any:
    request = pb.ActorRequest(method=method, args=json.dumps(args).encode(), encoding=pb.ENCODING_JSON, **kwargs)
    answer = ask("Invoke", request)
    return json.loads(answer.result) if not answer.HasField("error") else (answer.error.code, answer.error.message)


(actor,) = ask("ListActors", pb.ListActorsRequest()).actors
listed = ask("ListMethods", pb.ListMethodsRequest(actor_handle=actor.actor_handle)).methods
methods = {each.name: each for each in listed}
start = pb.ActorRequest(actor="calculator", method="double", args=b"[21]", encoding=pb.ENCODING_JSON)
ask("StartOperation", pb.StartOperationRequest(id="mine", request=start))
operation = ask("PollOperation", pb.PollOperationRequest(id="mine", wait_s=20))
said = [
    actor.name,
    actor.class_name,
    [methods["add"].signature, methods["add"].doc, methods["add"].idempotent, methods["label"].idempotent],
    call("add", [1], actor_handle=actor.actor_handle),
    call("add", {"left": 1, "right": 5}, actor="calculator"),
    call("echo", [{"nested": [None, True, "text"]}], actor="calculator"),
    call("fail", ["words"], actor="calculator"),
    call("give_lock", [], actor="calculator")[0],
    call("add", "neither", actor="calculator"),
    call("add", [1], actor_handle="unheard of")[0],
    call("unheard_of", [1], actor="calculator")[0],
    [operation.done, operation.response.result.decode()],
    ask("CancelOperation", pb.CancelOperationRequest(id="unheard of")).error.code == pb.NO_SUCH_OPERATION,
    "skipper.control" in sys.modules,
]
print(json.dumps(said))
