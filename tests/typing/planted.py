"""Mistakes: both type checkers have to report each line that is marked, and no other one."""

from __future__ import annotations

from typing import Any

from skipper import torchstore
from skipper.control import (
    Accumulator,
    Actor,
    ActorMesh,
    Channel,
    Port,
    ProcMesh,
    ValueMesh,
    as_endpoint,
    concurrent_endpoint,
    endpoint,
    get_or_spawn_controller,
)
from skipper.control.services import Service
from skipper.torchstore import sync
from tests.typing.actors import Box, Counter, Point, Special, Waiter


def spawning(procs: ProcMesh) -> None:
    procs.spawn("counters", Counter, "1")  # error: the type of an argument of __init__
    procs.spawn("counters", Counter)  # error: an argument of __init__ is missing
    procs.spawn("counters", Counter, 1, 2)  # error: too many arguments
    procs.spawn("counters", Counter, 1, steps=2)  # error: no such keyword
    procs.spawn("boxes", Box[int], "1")  # error: not the type variable's type
    procs.spawn("counters", dict)  # error: no actor class
    procs.spawn("waiters", Waiter, procs.spawn("boxes", Box[int], 1))  # error: the mesh of another class
    procs.spawn("waiters", Waiter, Counter(1))  # error: an actor in place of a mesh
    get_or_spawn_controller("counter", Counter, "1")  # error: the type of an argument of __init__
    waiters: ActorMesh[Waiter] = procs.spawn("counters", Counter, 1)  # error: the mesh of another class
    waiters.stop()


def arguments(counters: ActorMesh[Counter], waiters: ActorMesh[Waiter]) -> None:
    counters.add.call_one("1")  # error: the type of an argument
    counters.add.call("1")  # error: the type of an argument
    counters.add.choose("1")  # error: the type of an argument
    counters.add.stream("1")  # error: the type of an argument
    counters.add.broadcast("1")  # error: the type of an argument
    counters.where.rref(1.0)  # error: the type of an argument
    counters.add.call_one()  # error: an argument is missing
    counters.add.call_one(1, 2, 3)  # error: too many arguments
    counters.add.call_one(1, time=2)  # error: no such keyword
    counters.names.call_one("a", 2)  # error: the type of one of many arguments
    counters.where.call_one(point=None)  # error: a parameter that has no keyword
    waiters.wait.call_one("1")  # error: the type of an argument of an async endpoint
    waiters.again.call_one([])  # error: the type of an argument of a concurrent one
    counters.later.call_one("1")  # error: the type of an argument beside the response port
    counters.later.call_one(Channel[str].open()[0], 1)  # error: the response port is not for the caller
    waiters.both.call_one(counters, 1.0)  # error: the mesh of another class
    counters.slice(gpus="0")  # error: the index of a slice


def results(counters: ActorMesh[Counter]) -> None:
    one: str = counters.add.call_one(1).get()  # error: it is an int
    every: ValueMesh[str] = counters.add.call(1).get()  # error: they are ints
    chosen: list[int] = counters.add.choose(1).get()  # error: it is an int
    future: int = counters.add.call_one(1)  # error: get is missing
    single: int = counters.add.call(1).get()  # error: there is one for each actor
    port: int = counters.later.call_one(1).get()  # error: what is sent to the port is a str
    print(counters.where.call_one(Point(1)).get().y)  # error: no such attribute
    counters.add.broadcast(1).get()  # error: there is no result
    for stream in counters.add.stream(1):
        stream + 1  # error: a stream yields futures
    print(one, every, chosen, future, single, port)


async def awaited(counters: ActorMesh[Counter], waiters: ActorMesh[Waiter]) -> None:
    text: str = await waiters.wait.call_one(1.0)  # error: it is a float
    await counters.add.broadcast(1)  # error: there is nothing to wait for
    async for result in counters.add.stream(1):
        result.upper()  # error: it is an int
    (await waiters.wait.call(1.0)).upper()  # error: it is a ValueMesh
    print(text)


def endpoints(counters: ActorMesh[Counter]) -> None:
    counters.ad.call_one(1)  # error: no such endpoint
    counters.add.call_once(1)  # error: no such adverb
    counters.add(1)  # error: an adverb is missing
    counters.twice.call_one(1)  # error: no endpoint
    counters.twice(1)  # error: no endpoint
    print(counters.value)  # error: the state of actors is their own
    as_endpoint(counters.twice).call_one("1")  # error: the type of an argument
    as_endpoint(counters.twice, explicit_response_port=True)  # error: it takes no response port


def ports(counters: ActorMesh[Counter], port: Port[int]) -> None:
    port.send("1")  # error: what the port takes
    counters.subscribe.call_one(Channel[str].open()[0])  # error: a port of another type
    sender, receiver = Channel[float].open()
    sender.send("1")  # error: what the channel takes
    word: str = receiver.recv().get()  # error: what the channel gives
    print(word)


def services(service: Service[Counter]) -> None:
    Counter.options(num_replica=2)  # error: no such option
    Counter.options(num_replicas="2")  # error: the type of an option
    Counter.options().as_service("1")  # error: the type of an argument of __init__
    Counter.options().as_service()  # error: an argument of __init__ is missing
    service.add.route("1")  # error: the type of an argument
    service.add.fanout("1")  # error: the type of an argument
    service.add.fanout(1, rolling="2")  # error: the type of an option
    service.ad.route(1)  # error: no such endpoint
    service.add(1)  # error: an adverb is missing
    routed: str = service.add.route(1).get()  # error: it is an int
    fanned: int = service.add.fanout(1).get()  # error: there is one for each replica
    with service.session() as session:
        session.add.route([])  # error: the type of an argument
    print(routed, fanned)


def derived(counters: ActorMesh[Counter]) -> None:
    total = Accumulator(counters.add, 0, lambda so_far, value: so_far + value)
    total.accumulate("1")  # error: the type of an argument
    text: str = total.accumulate(1).get()  # error: it is an int
    counters.add.wrapped(instead).call_one(1)  # error: the wrapper takes a str
    print(text)


def instead(method: Any, word: str) -> bytes:
    return bytes(method(word))


class Caller(Actor):
    """Within an actor."""

    def __init__(self, counters: ActorMesh[Counter]) -> None:
        self.counters = counters

    @endpoint
    def call(self) -> int:
        self.count("1")  # error: the type of an argument
        self.count.call_one(1)  # error: within the actor it is a plain method
        self.slice(gpus=0)  # error: an actor is no mesh
        return self.counters.names.call_one().get()  # error: these are strs

    @endpoint
    def count(self, number: int) -> int:
        return number

    @endpoint(explicit_response_port=True)
    def answer(self, port: Port[str]) -> None:
        port.send(1)  # error: what the port takes

    @endpoint(explicit_response_port=True)  # error: there is no port
    def portless(self, number: int) -> None:
        print(number)

    @concurrent_endpoint  # error: it is not async
    def concurrent(self) -> None:
        print(self)


class Narrow(Special):
    """Overrides an endpoint by one that takes less."""

    @endpoint
    def add(self, amount: int) -> int:  # error: those who have a mesh of Special may give more
        return amount


async def stores() -> None:
    torchstore.keys()  # error: nobody awaits it
    await torchstore.put("key")  # error: the value is missing
    await torchstore.get(3)  # error: a key is a string
    sync.put("key", 1, store="other")  # error: there is no such argument
    torchstore.prove({}, "key")  # error: this is no certificate
    names: list[int] = sync.keys()  # error: these are strs
    print(names)
