"""`Served`: a service of the job, who calls it, and what has to become of each request.

Whoever calls gets an answer, or an error that says why not, as long as it lives. A request that is not idempotent is
handled once at most, and none that is reported as not handled was. What the service has lost it replaces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skipper.control import Actor, endpoint, idempotent
from skipper.control.api.service import ReplicaMetrics, ReplicaState
from skipper.control.model.errors import BackpressureError, ControlError, ReplicaLostError, ServiceEndedError
from skipper.control.model.future import Gate
from skipper.control.runtime import begin_log
from skipper.control.runtime.begin_log import BeginAddress, BeginLog, BeginView, ProcessGoneError
from skipper.control.services import replicas, service_client
from tests.simulation import ledger as ledgers
from tests.simulation import world as worlds

if TYPE_CHECKING:
    import random

    from skipper.control import ActorMesh, Future, ProcMesh
    from skipper.control.api.mesh import HostMesh
    from skipper.control.services import Service
    from tests.simulation.ledger import Ledger
    from tests.simulation.network import VirtualStream
    from tests.simulation.processes import SimulatedProcess

RETRIES = 3
CALLER = "caller"
_NAME = "policy"
_MOST_REPLICAS = 3


@dataclass(slots=True)
class Request:
    """One request.

    Attributes:
        caller: the process that it comes from.
        most: how often it may be handled.
        handled: how often it was.
        is_to_all: whether it is for all replicas. Then its error is that of one of them.
        was_untouched: whether it has ended in an error that says that nobody has handled it.
    """

    caller: SimulatedProcess
    most: int
    handled: int = 0
    is_to_all: bool = False
    was_untouched: bool = False


class Policy(Actor):
    """An actor of a replica."""

    @endpoint
    @idempotent
    def read(self, number: int) -> int:
        return _handle(number)

    @endpoint
    def write(self, number: int) -> int:
        return _handle(number)


def _handle(number: int) -> int:
    _current().requests[number].handled += 1
    return number


class Caller(Actor):
    """Calls the service from a process of its own."""

    @endpoint
    def call(self, service: Service[Policy], count: int) -> None:
        for _ in range(count):
            _current().request(service, ledgers.here())


class Served:
    """The service, and what was asked of it.

    Args:
        ledger: of the schedule.
        chance: for whatever may vary, apart from that of the schedule, so that those without a service stay the same.
        hosts: that the replicas are spread over; None: the script's own.
    """

    def __init__(self, ledger: Ledger, chance: random.Random, hosts: HostMesh | None) -> None:
        self.ledger = ledger
        self.chance = chance
        self.requests: list[Request] = []
        self.count = chance.randint(1, _MOST_REPLICAS)
        self.procs = chance.choice((1, 1, 2))
        self.service: Service[Policy] = Policy.options(
            procs=self.procs, num_replicas=self.count, hosts=hosts, retries=RETRIES, drain_timeout_s=5.0
        ).as_service(name=_NAME)
        self._has_hosts = hosts is not None
        self._callers: ActorMesh[Any] | None = None
        self._change: Future[None] | None = None
        """A change of the number of replicas; the next one is asked for when it has ended."""
        self._looked_s = 0.0
        """When the service was asked last how it is."""
        self._states: list[tuple[int, ReplicaState]] = []
        self._is_answering = False

    def begin(self, procs: ProcMesh) -> None:
        """Have processes from which the service is called, too."""
        self._callers = procs.flatten("p").spawn("callers", Caller)
        self.ledger.meshes.append(self._callers)

    def act(self) -> None:
        """Do something with it; in the script."""
        chance, script = self.chance, self.ledger.cluster.script
        what = chance.random()
        if what < 0.5:
            for _ in range(chance.choice((1, 1, 4, 20))):
                self.request(self.service, script)
        elif what < 0.75 and self._callers is not None:
            self._callers.call.broadcast(self.service, chance.randrange(1, 6))
        elif what < 0.8:
            number, request = self._new(script, is_repeatable=True)
            request.most *= _MOST_REPLICAS
            request.is_to_all = True
            self._expect(self.service.read.fanout(number), number, request)
        elif self._change is None or self._change.done():
            if what < 0.9:
                self.count = chance.randint(1, _MOST_REPLICAS)
                self._change = self.service.scale(self.count)
            else:
                self._change = self.service.drain(chance.randrange(self.count))
            self.ledger.expect(script, self._change, self._changed)

    def request(self, service: Service[Policy], caller: SimulatedProcess) -> None:
        """Send a request from a process; there."""
        is_repeatable = self.chance.random() < 0.5
        number, request = self._new(caller, is_repeatable=is_repeatable)
        try:
            answer = (service.read if is_repeatable else service.write).route(number)
        except BackpressureError:
            request.was_untouched = True
        else:
            self._expect(answer, number, request)

    def _new(self, caller: SimulatedProcess, *, is_repeatable: bool) -> tuple[int, Request]:
        self.requests.append(Request(caller, self.procs * (1 + RETRIES if is_repeatable else 1)))
        return len(self.requests) - 1, self.requests[-1]

    def _expect(self, answer: Future[Any], number: int, request: Request) -> None:
        self.ledger.expect(request.caller, answer, lambda answer: self._answered(answer, number, request))

    def _answered(self, answer: Future[Any], number: int, request: Request) -> None:
        world = self.ledger.world
        try:
            value = answer.get(0)
        except ServiceEndedError as error:
            request.was_untouched = error.is_unhandled and not request.is_to_all
            if not self._may_have_ended(request.caller):
                world.violation(f"request {number}: {error}")
        except ReplicaLostError as error:
            request.was_untouched = error.is_unhandled and not request.is_to_all
            if not self._has_lost_one(request.caller):
                world.violation(f"request {number}: nobody is lost: {error}")
        except Exception as error:  # noqa: BLE001  (nothing else may end a request)
            world.violation(f"request {number}: it ended in {type(error).__name__}: {error}")
        else:
            if not request.handled or (isinstance(value, int) and value != number):
                world.violation(f"request {number} was answered as {value!r}, and handled {request.handled} times")

    def _changed(self, change: Future[None]) -> None:
        try:
            change.get(0)
        except ControlError as error:
            if not self._may_have_ended(self.ledger.cluster.script):
                self.ledger.world.violation(f"the service was not changed: {error}")

    def _may_have_ended(self, caller: SimulatedProcess) -> bool:
        """Whether a caller may take the service for ended: it is the script's, and needs its hosts."""
        cluster = self.ledger.cluster
        script = cluster.script
        if self.ledger.is_lost(caller, script.id):
            return True
        return self._has_hosts and any(self.ledger.is_lost(script, host.id) for host in cluster.hosts)

    def _has_lost_one(self, caller: SimulatedProcess) -> bool:
        """Whether a caller may have lost a replica, or one of its processes another.

        A replica may be stopped when a request is on its way that was sent before the caller knew of the change.
        """
        processes = self._processes()
        if any(process.process.closing for process in processes):
            return True
        pairs = ((one, other) for one in (caller, *processes) for other in processes if one is not other)
        return any(self.ledger.is_lost(one, other.id) for one, other in pairs)

    def _processes(self) -> list[SimulatedProcess]:
        return [each for each in self.ledger.cluster.processes if _is_of_replica(each)]

    # In the end

    def missing(self) -> Iterator[str]:
        """What has not come about and has to, or has too often."""
        for number, request in enumerate(self.requests):
            if request.handled > (0 if request.was_untouched else request.most):
                yield f"request {number} was handled {request.handled} times, of {request.most}"
        script = self.ledger.cluster.script
        if self._may_have_ended(script):
            return
        if self._looked_s < self.ledger.world.now_s:
            self._looked_s = self.ledger.world.now_s
            self.ledger.world.at(self._looked_s, script, self._look)
        if self._states != [(number, ReplicaState.READY) for number in range(self.count)]:
            yield f"the service is not whole: {self._states}"
        if not self._is_answering:
            yield "the service does not answer"
        alive = [each for each in self._processes() if not each.is_dead]
        known = [each for each in alive if not self.ledger.is_lost(script, each.id)]
        # A process that may be taken for lost need not be: one that froze while it was being dialed.
        if not len(known) <= self.count * self.procs <= len(alive):
            yield f"{self.count} replicas have {len(alive)} processes: {', '.join(map(str, alive))}"

    def _look(self) -> None:
        self.service.metrics().add_done_callback(self._seen)
        self._is_answering = False
        number, _ = self._new(self.ledger.cluster.script, is_repeatable=True)
        self.service.read.route(number).add_done_callback(self._read)

    def _read(self, answer: Future[Any]) -> None:
        with contextlib.suppress(ReplicaLostError):  # which has a replica replaced: the next look is answered
            answer.get(0)
            self._is_answering = True

    def _seen(self, metrics: Future[list[ReplicaMetrics]]) -> None:
        try:
            self._states = [(each.replica, each.state) for each in metrics.get(0)]
        except ControlError as error:
            if not self._may_have_ended(self.ledger.cluster.script):
                self.ledger.world.violation(f"the service does not say how it is: {error}")


def is_call(stream: VirtualStream) -> bool:
    """Whether a stream is one from a caller's process to a replica's."""
    return stream.owner.name.startswith(CALLER) and _is_of_replica(stream.other_owner)


def is_within_replica(stream: VirtualStream) -> bool:
    """Whether a stream is one between two processes of a replica."""
    return _is_of_replica(stream.owner) and _is_of_replica(stream.other_owner)


def _is_of_replica(process: SimulatedProcess | None) -> bool:
    return process is not None and process.name.startswith(f"{_NAME}-")


class VirtualBeginLog(BeginLog):
    """The log of an actor of a simulated process."""

    def __init__(self) -> None:
        super().__init__()
        process = ledgers.here()
        process.cluster.begin_logs[self.address.token] = process, self._words


class VirtualBeginView(BeginView):
    """A view of one."""

    def __init__(self, address: BeginAddress, reader: str) -> None:
        here = ledgers.here()
        self._process, self._words = here.cluster.begin_logs[address.token]
        if self._process.ip != here.ip:
            raise OSError(f"{self._process} runs elsewhere")
        if self._process.is_dead:
            raise ProcessGoneError(f"{self._process} has ended")
        self._key = begin_log._key_of(reader)
        self._patience_s = begin_log._DEATH_S
        self._taken = None

    def _is_over(self, timeout_s: float = 0.0) -> bool:
        if timeout_s and not self._process.is_dead:
            gate = Gate()
            self._process.when_dead.append(gate.open)
            self._process.world.wait(gate, timeout_s, takes_all=False)
        return self._process.is_dead


def install() -> None:
    """Have logs of begun requests be those of simulated processes, and retries be sent on the virtual clock."""
    begin_log.BeginLog = VirtualBeginLog  # type: ignore[misc]
    replicas.BeginView = service_client.BeginView = VirtualBeginView  # type: ignore[misc]
    service_client._retry_thread = _RetryThread()  # type: ignore[assignment]


class _RetryThread:
    """What the retry thread of services does happens in a moment, in the process whose job it is."""

    def submit(self, job: Any) -> None:
        """Have it happen."""
        worlds.current().soon_here(job)


def _current() -> Served:
    served = ledgers.current().served
    assert served is not None
    return served
