"""Code without mistakes: neither type checker may report anything, and both infer the types that are asserted."""

# pyright: strict

from __future__ import annotations

from typing import Any, assert_type

from skipper import torchstore
from skipper.control import (
    Accumulator,
    ActorMesh,
    Channel,
    Extent,
    Future,
    Point,
    Port,
    PortReceiver,
    ProcMesh,
    ValueMesh,
    as_endpoint,
    get_or_spawn_controller,
    this_host,
    this_proc,
)
from skipper.control.services import ReplicaMetrics, Service, Session
from skipper.torchstore import sync
from tests.typing import actors
from tests.typing.actors import Box, Counter, Special, Untyped, Waiter


def spawning(procs: ProcMesh) -> None:
    counters = procs.spawn("counters", Counter, 1, step=2)
    assert_type(counters, ActorMesh[Counter])
    assert_type(this_host().spawn_procs({"gpus": 2}).spawn("waiters", Waiter, counters), ActorMesh[Waiter])
    assert_type(this_proc().spawn("box", Box[int], 1), ActorMesh[Box[int]])
    assert_type(get_or_spawn_controller("counter", Counter, 1).get(), ActorMesh[Counter])
    takes_counters(counters.slice(gpus=0), procs.spawn("special", Special, 1))
    takes_anything(counters)
    untyped = procs.spawn("untyped", Untyped)
    assert_type(untyped.anything.call_one(1, a=2).get(), Any)
    untyped.get.call_one("key", default=3)  # pyright: ignore[reportUnknownMemberType]  # nobody knows it


def takes_counters(first: ActorMesh[Counter], second: ActorMesh[Counter]) -> None:
    assert_type(first.add.call_one(1) if first.size == 1 else second.add.call_one(2), Future[int])


def takes_anything(mesh: ActorMesh[Any]) -> None:
    mesh.slice(gpus=0).anything.call_one("whatever").get()


def adverbs(counters: ActorMesh[Counter]) -> None:
    assert_type(counters.add.call_one(1, times=2).get(), int)
    assert_type(counters.add.call(1).get(), ValueMesh[int])
    assert_type(counters.add.choose(amount=1).get(timeout=3), int)
    assert_type(list(counters.add.stream(1)), list[Future[int]])
    counters.reset.broadcast()
    assert_type(counters.reset.call_one(), Future[None])
    assert_type(counters.where.rref(actors.Point(1)), actors.Point)
    assert_type(counters.where.call_one(actors.Point(1)).get().x, float)
    assert_type(counters.names.call_one("a", "b", end="c").get(), list[str])
    assert_type(counters.later.call_one(1).get(), str)
    assert_type(counters.later.call(number=1).get(), ValueMesh[str])


async def asynchronous(waiters: ActorMesh[Waiter]) -> None:
    assert_type(await waiters.wait.call_one(0.5), float)
    assert_type(await waiters.wait.call(1), ValueMesh[float])
    assert_type(await waiters.both.choose(waiters, 1), tuple[float, str])
    assert_type(await waiters.ask.call_one([1, 2]), int)
    async for result in waiters.again.stream(0.5):
        assert_type(result, float)
    assert_type(await waiters.open.call_one(), Port[int])


def meshes(counters: ActorMesh[Counter], procs: ProcMesh) -> None:
    assert_type(counters.slice(gpus=slice(0, 2)), ActorMesh[Counter])
    assert_type(counters.flatten("all").rename(all="some").split(some={"a": 1, "b": 2}), ActorMesh[Counter])
    assert_type(counters.over(procs.slice(gpus=0)).add.call_one(1), Future[int])
    assert_type(counters.extent, Extent)
    assert_type(counters.uid, int)
    counters.initialized.get(3)
    assert_type(counters.stop(), Future[None])


def values(results: ValueMesh[int]) -> None:
    assert_type(results[0], int)
    assert_type(results[0:2], list[int])
    assert_type(results.item(gpus=1), int)
    assert_type(list(results.items()), list[tuple[Point, int]])
    assert_type(results.slice(gpus=slice(1)), ValueMesh[int])
    assert_type(sum(results), int)


def ports(counters: ActorMesh[Counter]) -> None:
    port, receiver = Channel[float].open()
    assert_type(port, Port[float])
    assert_type(receiver, PortReceiver[float])
    port.send(1)
    assert_type(receiver.recv().get(3), float)
    counters.subscribe.call_one(port).get()
    port.link(counters)
    anything, received = Channel.open()
    anything.send("whatever")
    assert_type(received.recv().get(), Any)


def plain_methods(counters: ActorMesh[Counter]) -> None:
    assert_type(as_endpoint(counters.twice).call_one(1).get(), int)
    assert_type(as_endpoint(counters.delayed, explicit_response_port=True).call_one(1).get(), bytes)
    assert_type(as_endpoint(counters.add).call_one(1, times=3).get(), int)


def derived(counters: ActorMesh[Counter], boxes: ActorMesh[Box[str]]) -> None:
    total = Accumulator(counters.add, 0.0, lambda so_far, value: so_far + value)
    assert_type(total.accumulate(1).get(), float)
    assert_type(counters.add.wrapped(instead).call_one("x").get(), bytes)
    assert_type(boxes.swap.call_one("x").get(), str)


def folded(total: Accumulator[float]) -> float:
    return total.accumulate("whatever").get()


def instead(method: Any, word: str) -> bytes:
    return bytes(method(word))


async def services(counters: ActorMesh[Counter]) -> None:
    service = Counter.options(num_replicas=2, retries=1).as_service(1, step=3)
    assert_type(service, Service[Counter])
    assert_type(await service.add.route(1), int)
    assert_type(await service.add.fanout(1), ValueMesh[int])
    assert_type(await service.add.fanout(1, rolling=1), ValueMesh[int])
    assert_type(await service.add.fanout(1, absent="skip"), ValueMesh[int])
    assert_type(await service.later.route(1), str)
    assert_type(await service.metrics(), list[ReplicaMetrics])
    await service.initialized
    await service.scale(3)
    await service.drain(0)
    with service.session() as session:
        assert_type(session, Session[Counter])
        assert_type(await session.add.route(1, times=2), int)
        assert_type(session.replica, int | None)
    assert_type(Waiter.options().as_service(counters, name="waiters"), Service[Waiter])
    sharded = Counter.options(procs=2).as_service(1)  # a result of it is a ValueMesh, which the types do not know
    assert_type((await sharded.add.route(1))[0], Any)
    await service.stop()


async def stores() -> None:
    assert_type(await torchstore.keys("prefix", store_name="other"), list[str])
    assert_type(await torchstore.put_state_dict({}, "key", version=3), int)
    certificate = await torchstore.certificate("key", version=3)
    assert_type(certificate, torchstore.Certificate)
    assert_type(torchstore.prove({}, certificate, strict=False), torchstore.Proof)
    assert_type(certificate.accepts(torchstore.join_proofs(certificate, []).tag()), bool)
    assert_type(sync.certificate("key"), torchstore.Certificate)
    assert_type(sync.keys("prefix", store_name="other"), list[str])
    assert_type(sync.put_state_dict({}, "key", version=3, timeout=1.5), int)
    assert_type(sync.versions("key"), tuple[int, ...])
