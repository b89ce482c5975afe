"""`Request`: what a caller wants from a service, until it is answered; `Attempt`: one sending of it to one replica."""

from __future__ import annotations

import itertools
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from skipper.control.api.endpoint import Endpoint
from skipper.control.model.endpoint_decorators import EndpointSpec
from skipper.control.model.errors import LinkError, ReplicaLostError, SessionLostError, SupervisionError
from skipper.control.model.future import Promise, raising
from skipper.control.runtime.begin_log import Fate
from skipper.control.runtime.messages import Loss
from skipper.control.runtime.port import Port, link_port
from skipper.control.runtime.process import Process
from skipper.control.runtime.replies import open_reply, open_supervision
from skipper.control.services.router import Router, Seat
from skipper.control.services.table import ReplicaState
from skipper.control.wire.envelope import Kind, Payload

if TYPE_CHECKING:
    from skipper.control.services.service_client import Caller


_numbers = itertools.count()


class Request:
    """A request to whichever replica has the least to do.

    Args:
        spec: the endpoint.
        endpoint: the one that it is sent to, of the replica's entry.
        payload: the arguments of that, packed: they are as they were when the request was made, however often it is
            sent.
        ports: those among the arguments through which somebody waits for an answer.

    Attributes:
        number: those that were made later have higher ones.
        in_turn: whether a replica handles it and its like one at a time, and any replica will do. Then it may wait at
            the caller while all of them have enough to do.
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

    def __lt__(self, other: Request) -> bool:
        return self.number < other.number

    def pick(self, service: str, router: Router, *, in_turn: bool = False) -> Seat | None:
        """The replica to send it to; None if it has to wait for one.

        Args:
            service: name of the service.
            router: which knows the replicas.
            in_turn: wait where all of them have enough to do, too.

        Raises:
            ReplicaLostError: there will be none.
        """
        return router.choose(in_turn=in_turn)

    def lost(self, service: str, seat: Seat, error: SupervisionError) -> ReplicaLostError:
        """What the caller is told if it is not sent again."""
        done = "did not begin" if error.is_unhandled else "may or may not have handled"
        message = f"replica {seat.number} of {service} is gone and {done} {self.spec.name}: {error.message}"
        return ReplicaLostError(service, seat.number, message, error.failure, is_unhandled=error.is_unhandled)

    def is_bound(self) -> bool:
        """Whether no other replica than the one that it was sent to may answer."""
        return False

    def fail(self, error: Exception) -> None:
        """End it in an error."""
        self.future.fail_by(raising(error))

    def send(self, process: Process, attempt: Attempt) -> None:
        """Send it to the replica of an attempt.

        Raises:
            BackpressureError: the replica is too far behind; nothing was sent.
        """
        for port in self.ports:
            link_port(port, attempt.seat.entry._actors())
        attempt.port = process.ports.reserve()  # known before anybody can tell that the replica is lost
        attempt.endpoint._post(process, self.payload, attempt, port=attempt.port)


class PlaceRequest(Request):
    """A request to the replica of one number, whichever process fills its place when it is sent.

    Args:
        number: of the replica.
        is_skipped: whether it is for the one that is there now, or else for nobody.

    Attributes:
        is_void: whether there was nobody to send it to, since the service has been scaled down.
    """

    __slots__ = ("_is_skipped", "_number", "is_void")

    def __init__(
        self,
        number: int,
        is_skipped: bool,
        spec: EndpointSpec,
        endpoint: str,
        payload: Payload,
        ports: list[Port[Any]],
    ) -> None:
        super().__init__(spec, endpoint, payload, ports)
        self._number = number
        self._is_skipped = is_skipped
        self.is_void = False
        self.in_turn = False

    def pick(self, service: str, router: Router, *, in_turn: bool = False) -> Seat | None:
        """The replica that has the number."""
        seat = router.seat(self._number)
        if seat is not None and seat.state is not ReplicaState.STARTING:
            return seat
        if self._is_skipped or self._number not in router.numbers:
            self.is_void = not self.attempts and self._number not in router.numbers
            message = f"{service} has no replica {self._number} that is up"
            raise ReplicaLostError(service, self._number, message, is_unhandled=not self.attempts)
        return None

    def is_bound(self) -> bool:
        """Whether its successor may not answer."""
        return self._is_skipped


class Binding:
    """The replica that a session has; none before its first request could be sent."""

    __slots__ = ("is_closed", "seat")

    def __init__(self) -> None:
        self.seat: Seat | None = None
        self.is_closed = False

    def bind(self, router: Router) -> Seat | None:
        """Take a replica, unless there is one already or there is none to be had."""
        if self.seat is None and not self.is_closed:
            self.seat = router.choose_for_session()
            if self.seat is not None:
                self.seat.sessions += 1
        return self.seat


class SessionRequest(Request):
    """A request to the replica of a session, and to no other."""

    __slots__ = ("_binding",)

    def __init__(
        self, binding: Binding, spec: EndpointSpec, endpoint: str, payload: Payload, ports: list[Port[Any]]
    ) -> None:
        super().__init__(spec, endpoint, payload, ports)
        self._binding = binding
        self.in_turn = False

    def pick(self, service: str, router: Router, *, in_turn: bool = False) -> Seat | None:
        """The session's replica."""
        seat = self._binding.bind(router)
        if seat is not None and not seat.takes_sessions():
            message = f"replica {seat.number} of {service} is gone, and this session with it"
            raise SessionLostError(service, seat.number, message, is_unhandled=not self.attempts)
        return seat

    def lost(self, service: str, seat: Seat, error: SupervisionError) -> ReplicaLostError:
        """That the session is over."""
        message = f"replica {seat.number} of {service} is gone, and this session with it: {error.message}"
        return SessionLostError(service, seat.number, message, error.failure, is_unhandled=error.is_unhandled)

    def is_bound(self) -> bool:
        """It is: what the session has is with that replica."""
        return True


class Attempt:
    """One sending of a request; what stands behind the port for its answer (see `control.runtime.ports.Reply`)."""

    __slots__ = (
        "_caller",
        "_is_entrusted",
        "_taken_before",
        "begin_ns",
        "endpoint",
        "is_over",
        "port",
        "request",
        "seat",
    )

    def __init__(self, caller: Caller, request: Request, seat: Seat) -> None:
        self._caller = caller
        self.request = request
        self.seat = seat
        self.endpoint: Endpoint[..., Any] = getattr(seat.entry, request.endpoint)
        self.port = 0
        self.is_over = False
        self._taken_before = 0 if seat.begins is None else seat.begins.count
        self.begin_ns = perf_counter_ns()
        self._is_entrusted = False

    def deliver(self, rank: int, kind: Kind, payload: Payload) -> bool:
        """Take the reply."""
        error = open_supervision(payload) if kind is Kind.ERROR else None
        if error is None:
            if self._caller.answered(self, is_error=kind is Kind.ERROR):
                end = self.request.future.fail_by if kind is Kind.ERROR else self.request.future.settle_by
                end(lambda: open_reply(kind, payload))
        else:
            # An actor that only drops its response port lives on; of one that is stopped the keeper tells.
            self._caller.failed(self, error, is_dead=error.is_unhandled or error.failure is not None)
        return True

    def process_lost(self, process_id: str, loss: Loss) -> bool:
        """Give up on the reply if it was to come from this process."""
        (awaited,) = self.endpoint._awaited
        if self._is_entrusted or process_id != awaited.process_id:
            return False
        self._caller.process_lost(self, awaited.error(loss))
        return True

    def entrust(self, rank: int) -> None:
        """The reply may come from elsewhere."""
        self._is_entrusted = True

    def fate(self) -> Fate:
        """What the replica, which is gone, had done with it; may wait where the seat's ``begins`` is not final."""
        begins = self.seat.begins
        return Fate.PERHAPS_BEGUN if begins is None else begins.fate(self.port, self._taken_before)

    def lapse(self, rank: int, error: LinkError) -> bool:
        """Whoever might have replied is dead."""
        self._caller.failed(self, error, is_dead=False)
        return True
