"""The guide's "Advanced Patterns": explicit response ports, supervision of children, channels, value meshes."""

import threading
from queue import Queue
from typing import Any

import pytest

from skipper.control import (
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    MeshFailure,
    Port,
    PortReceiver,
    ProcMesh,
    SupervisionError,
    ValueMesh,
    context,
    endpoint,
    this_host,
)
from tests.control.conftest import wait_until

TIMEOUT_S = 20.0


class Kitchen(Actor):
    """Takes orders with a response port and cooks them on a thread of its own."""

    def __init__(self) -> None:
        self.orders: Queue[tuple[Port[str], str] | None] = Queue()
        self.cook = threading.Thread(target=self._cook)
        self.cook.start()

    @endpoint(explicit_response_port=True)
    def order(self, port: Port[str], dish: str) -> None:
        self.orders.put((port, dish))

    def _cook(self) -> None:
        held: list[tuple[Port[str], str]] = []
        while (order := self.orders.get()) is not None:
            held.append(order)
            if len(held) == 3:  # served in the other order
                while held:
                    port, dish = held.pop()
                    port.send(f"{dish}, served {3 - len(held)}.")

    def __cleanup__(self, error: Exception | None) -> None:
        self.orders.put(None)
        self.cook.join(5)


def test_response_ports_answer_out_of_order_from_a_thread_of_the_actor(row: ProcMesh) -> None:
    kitchen = row.slice(gpus=0).spawn("kitchen", Kitchen)
    orders = [kitchen.order.call_one(dish) for dish in ("soup", "fish", "cake")]
    assert [order.get(TIMEOUT_S) for order in orders] == ["soup, served 3.", "fish, served 2.", "cake, served 1."]
    kitchen.stop().get(TIMEOUT_S)


class Worker(Actor):
    @endpoint
    def work(self, value: int) -> int:
        return 100 // value


class BadWorker(Actor):
    def __init__(self) -> None:
        raise RuntimeError("cannot be made")

    @endpoint
    def work(self, value: int) -> int:
        return value


class Foreman(Actor):
    """Restarts children whose failure is recoverable and hands the others up."""

    def __init__(self) -> None:
        self.children: dict[str, ActorMesh[Any]] = {}
        self.events: list[str] = []

    def __supervise__(self, event: MeshFailure) -> bool:
        self.events.append(str(event))
        if event.is_recoverable():
            self.restart_child(event.actor_id)
            return True
        return False

    def restart_child(self, actor_id: str) -> None:
        name = actor_id.partition("[")[0]
        self.children[name] = context().proc.spawn(name, Worker)

    @endpoint
    def spawn_worker(self, name: str, cls: type[Actor] = Worker) -> ActorMesh[Any]:
        self.children[name] = context().proc.spawn(name, cls)
        return self.children[name]

    @endpoint
    def work(self, name: str, value: int) -> int:
        return self.children[name].work.call_one(value).get(TIMEOUT_S)

    @endpoint
    def seen(self) -> list[str]:
        return self.events


def test_a_supervisor_restarts_a_child_that_can_be_restarted(row: ProcMesh) -> None:
    foreman = row.slice(gpus=1).spawn("foreman", Foreman)
    worker = foreman.spawn_worker.call_one("digger").get(TIMEOUT_S)
    worker.work.broadcast(0)  # raises, and nobody waits for the answer
    wait_until(lambda: bool(foreman.seen.call_one().get(TIMEOUT_S)), "the foreman is told")
    assert foreman.work.call_one("digger", 4).get(TIMEOUT_S) == 25
    (event,) = foreman.seen.call_one().get(TIMEOUT_S)
    assert "ZeroDivisionError" in event
    assert "digger" in event
    with pytest.raises(SupervisionError):
        worker.work.call_one(4).get(TIMEOUT_S)  # the first digger stays dead
    foreman.stop().get(TIMEOUT_S)


def test_a_supervisor_hands_up_what_a_restart_would_not_mend(row: ProcMesh, failures: Any) -> None:
    foreman = row.slice(gpus=1).spawn("foreman", Foreman)
    foreman.spawn_worker.call_one("bad", BadWorker).get(TIMEOUT_S)
    failure = failures.wait()
    assert failure.mesh_name == "foreman"
    assert "cannot be made" in failure.report().splitlines()[0]
    with pytest.raises(SupervisionError):
        foreman.seen.call_one().get(TIMEOUT_S)


class Mill(Actor):
    def __init__(self) -> None:
        self.consumers: list[Port[Any]] = []

    @endpoint
    def register_consumer(self, port: Port[Any]) -> None:
        self.consumers.append(port)

    @endpoint
    def registered(self) -> int:
        return len(self.consumers)

    @endpoint
    def grind(self, data: Any) -> int:
        for port in self.consumers:
            port.send(data)
        return len(self.consumers)


class Baker(Actor):
    """Opens a channel in `__init__` and registers its port with the mill of rank 0."""

    def __init__(self, mill: ActorMesh[Mill]) -> None:
        self.port, self.receiver = Channel.open()
        mill = mill.slice(gpus=0)
        mill.register_consumer.call_one(self.port)

    @endpoint
    async def consume(self) -> Any:
        return await self.receiver.recv()

    @endpoint
    async def give_away_the_receiver(self) -> PortReceiver[Any]:
        return self.receiver


def test_a_channel_brings_values_from_a_producer_to_its_consumers(row: ProcMesh) -> None:
    mills = row.spawn("mills", Mill)
    bakers = row.spawn("bakers", Baker, mills)
    mill = mills.slice(gpus=0)
    wait_until(lambda: mill.registered.call_one().get(TIMEOUT_S) == 2, "both bakers have registered")
    waiting = bakers.consume.call()
    assert mill.grind.call_one({"flour": 3}).get(TIMEOUT_S) == 2
    assert waiting.get(TIMEOUT_S) == [{"flour": 3}, {"flour": 3}]
    with pytest.raises(ActorError, match="send the port instead"):
        bakers.slice(gpus=0).give_away_the_receiver.call_one().get(TIMEOUT_S)
    bakers.stop().get(TIMEOUT_S)
    mills.stop().get(TIMEOUT_S)


class Postman(Actor):
    @endpoint
    def carry(self, port: Port[Any]) -> Port[Any]:
        port.send("from the postman")
        return port


def test_a_port_is_sent_to_an_actor_and_back(row: ProcMesh) -> None:
    postman = row.slice(gpus=0).spawn("postman", Postman)
    port, receiver = Channel.open()
    postman.carry.call_one(port).get(TIMEOUT_S).send("from home")
    assert [receiver.recv().get(TIMEOUT_S) for _ in range(2)] == ["from the postman", "from home"]
    postman.stop().get(TIMEOUT_S)


class Configured(Actor):
    def __init__(self, config_mesh: ValueMesh[dict[str, int]]) -> None:
        rank = context().actor_instance.rank
        self.config = config_mesh[rank]

    @endpoint
    def get_config(self) -> dict[str, int]:
        return self.config


def test_each_actor_takes_its_own_of_a_mesh_of_values() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    configs = [{"id": number, "param": number * 10} for number in range(2)]
    config_mesh = ValueMesh.from_list(configs, extent={"gpus": 2})
    actors = procs.spawn("configured", Configured, config_mesh)
    assert actors.get_config.call().get(TIMEOUT_S) == config_mesh == configs
    assert config_mesh[{"gpus": 1}] == config_mesh.item(gpus=1) == configs[1]
    procs.stop().get(TIMEOUT_S)
