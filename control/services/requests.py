"""`ServiceRequest`: what a caller wants from a service, until it is answered. `RequestAttempt`: one sending of it."""

from __future__ import annotations

import itertools
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from skipper.control.api.endpoint import Endpoint
from skipper.control.api.mesh_base import actors_of
from skipper.control.api.service import ReplicaState
from skipper.control.model.endpoint_spec import EndpointSpec
from skipper.control.model.errors import LinkError, ReplicaLostError, SessionLostError, SupervisionError
from skipper.control.model.future import Promise, raising
from skipper.control.runtime.begin_log import Fate
from skipper.control.runtime.messages import Loss
from skipper.control.runtime.port import Port, link_port
from skipper.control.runtime.process import Process
from skipper.control.runtime.replies import open_reply, open_supervision
from skipper.control.services.router import KnownReplica, Router
from skipper.control.wire.messages import Kind, Payload
from skipper.control.wire.payload import unpack

if TYPE_CHECKING:
    from skipper.control.services.service_client import ServiceClient


_numbers = itertools.count()


class ServiceRequest:
    """A request to the replica that has the least to do.

    Args:
        spec: the endpoint.
        endpoint: the endpoint of the replica's entry that it is sent to.
        payload: its packed arguments. They are packed once, so each sending has the same content.
        ports: those among the arguments through which a caller waits for an answer.

    Attributes:
        number: later requests have higher numbers.
        in_turn: whether a replica handles such requests one at a time, and any replica may take it. Then it may wait at
            the caller while all replicas have enough to do.
        attempts: how often it was sent to a replica that may have opened it.
    """

    __slots__ = ("attempts", "endpoint", "future", "in_turn", "number", "payload", "ports", "spec")

    def __init__(self, spec: EndpointSpec, endpoint: str, payload: Payload, ports: list[Port[Any]]) -> None:
        self.spec = spec
        self.endpoint = endpoint
        self.payload = payload
        self.ports = ports
        self.future: Promise[Any] = Promise()
        self.attempts = 0
        self.number = next(_numbers)
        self.in_turn = not (spec.concurrent or spec.explicit_response_port)

    def __lt__(self, other: ServiceRequest) -> bool:
        return self.number < other.number

    def pick(self, service: str, router: Router, *, in_turn: bool = False) -> KnownReplica | None:
        """The replica to send it to; None if it has to wait for one.

        Args:
            service: name of the service.
            router: the router, which knows the replicas.
            in_turn: also wait if all of them have enough to do.

        Raises:
            ReplicaLostError: there will be none.
        """
        return router.choose(in_turn=in_turn)

    def waits_in_vain(self, router: Router) -> bool:
        """Whether the replica that it waits for is up, but this process cannot reach it."""
        return router.is_out_of_reach()

    def lost(self, service: str, replica: KnownReplica, error: SupervisionError) -> ReplicaLostError:
        """The error for the caller if the request is not sent again."""
        done = "did not begin" if error.is_unhandled else "may or may not have handled"
        message = f"replica {replica.number} of {service} is gone and {done} {self.spec.name}: {error.message}"
        return ReplicaLostError(service, replica.number, message, error.failure, is_unhandled=error.is_unhandled)

    def is_bound(self) -> bool:
        """Whether only the replica that it was sent to may answer."""
        return False

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        self.future.fail_by(raising(error))

    def send(self, process: Process, attempt: RequestAttempt) -> None:
        """Send it to the replica of an attempt.

        Raises:
            BackpressureError: the replica is too far behind; nothing was sent.
        """
        for port in self.ports:
            link_port(port, actors_of(attempt.replica.entry))
        attempt.port = process.ports.reserve()  # noted before a loss of the replica can be reported
        attempt.endpoint.post(process, self.payload, attempt, port=attempt.port)


class SlotRequest(ServiceRequest):
    """A request to the replica that has a certain number when the request is sent.

    Args:
        number: number of the replica.
        is_skipped: whether only the process that has the number now may answer.

    Attributes:
        is_void: whether there was no replica to send it to, since the service was scaled down.
    """

    __slots__ = ("_is_skipped", "_number", "is_void")

    def __init__(
        self, number: int, is_skipped: bool, spec: EndpointSpec, endpoint: str, payload: Payload, ports: list[Port[Any]]
    ) -> None:
        super().__init__(spec, endpoint, payload, ports)
        self._number = number
        self._is_skipped = is_skipped
        self.is_void = False
        self.in_turn = False

    def pick(self, service: str, router: Router, *, in_turn: bool = False) -> KnownReplica | None:
        """The replica that has the number."""
        replica = router.replica(self._number)
        if replica is not None and replica.state is not ReplicaState.STARTING:
            return replica
        if self._is_skipped or self._number not in router.numbers:
            self.is_void = not self.attempts and self._number not in router.numbers
            message = f"{service} has no replica {self._number} that is up"
            raise ReplicaLostError(service, self._number, message, is_unhandled=not self.attempts)
        return None

    def waits_in_vain(self, router: Router) -> bool:
        """Whether the replica of its number is up, but this process cannot reach it."""
        return router.is_out_of_reach(self._number)

    def is_bound(self) -> bool:
        """Whether no successor may answer."""
        return self._is_skipped


class SessionBinding:
    """The replica of a session. There is none before the first request could be sent."""

    __slots__ = ("is_closed", "replica")

    def __init__(self) -> None:
        self.replica: KnownReplica | None = None
        self.is_closed = False

    def bind(self, router: Router) -> KnownReplica | None:
        """Take a replica, unless the session has one already. None: no replica takes sessions now."""
        if self.replica is None and not self.is_closed:
            self.replica = router.choose_for_session()
            if self.replica is not None:
                self.replica.sessions += 1
        return self.replica


class SessionRequest(ServiceRequest):
    """A request to the replica of a session, and to no other."""

    __slots__ = ("_binding",)

    def __init__(
        self, binding: SessionBinding, spec: EndpointSpec, endpoint: str, payload: Payload, ports: list[Port[Any]]
    ) -> None:
        super().__init__(spec, endpoint, payload, ports)
        self._binding = binding
        self.in_turn = False

    def pick(self, service: str, router: Router, *, in_turn: bool = False) -> KnownReplica | None:
        """The session's replica."""
        replica = self._binding.bind(router)
        if replica is not None and not replica.takes_sessions():
            message = f"replica {replica.number} of {service} is gone, and this session with it"
            raise SessionLostError(service, replica.number, message, is_unhandled=not self.attempts)
        return replica

    def lost(self, service: str, replica: KnownReplica, error: SupervisionError) -> ReplicaLostError:
        """The error that the session is over."""
        message = f"replica {replica.number} of {service} is gone, and this session with it: {error.message}"
        return SessionLostError(service, replica.number, message, error.failure, is_unhandled=error.is_unhandled)

    def is_bound(self) -> bool:
        """True: the session's state exists only in that replica."""
        return True


class RequestAttempt:
    """One sending of a request; takes its answer (see `control.runtime.interfaces.ReplyHandler`)."""

    __slots__ = (
        "_client",
        "_is_entrusted",
        "_taken_before",
        "begin_ns",
        "endpoint",
        "is_over",
        "port",
        "replica",
        "request",
    )

    def __init__(self, client: ServiceClient, request: ServiceRequest, replica: KnownReplica) -> None:
        self._client = client
        self.request = request
        self.replica = replica
        self.endpoint: Endpoint[..., Any] = getattr(replica.entry, request.endpoint)
        self.port = 0
        self.is_over = False
        self._taken_before = 0 if replica.begins is None else replica.begins.count
        self.begin_ns = perf_counter_ns()
        self._is_entrusted = False

    def deliver(self, rank: int, kind: Kind, payload: Payload) -> bool:
        """Take the reply."""
        error = open_supervision(payload) if kind is Kind.FAILURE else None
        if error is None:
            if self._client.answered(self, is_error=kind is Kind.FAILURE):
                if kind is Kind.FAILURE:
                    self.request.future.fail_by(lambda: open_reply(kind, payload))
                else:
                    self.request.future.settle_by(unpack, payload)
        else:
            self._client.failed(self, error, is_dead=True)
        return True

    def process_lost(self, process_id: str, loss: Loss) -> bool:
        """Give up on the reply if it was to come from this process."""
        (awaited,) = self.endpoint.awaited
        if self._is_entrusted or process_id != awaited.process_id:
            return False
        self._client.process_lost(self, awaited.error(loss))
        return True

    def entrust(self, rank: int) -> None:
        """Another process may send the reply."""
        self._is_entrusted = True

    def fate(self) -> Fate:
        """What the replica, which is gone, had done with it; may wait until the replica's ``begins`` is final."""
        begins = self.replica.begins
        return Fate.PERHAPS_BEGUN if begins is None else begins.fate(self.port, self._taken_before)

    def lapse(self, rank: int, error: LinkError) -> bool:
        """All actors that might have replied are dead."""
        self._client.failed(self, error, is_dead=False)
        return True
