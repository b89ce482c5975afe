"""`Caller`: how one process calls one service. It routes by itself; the keeper only tells it of changes."""

from __future__ import annotations

import dataclasses
import secrets
import threading
import weakref
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING

from control import settings as bounds
from control.actor import ActorInterface
from control.errors import BackpressureError, ControlError, ServiceEndedError, SupervisionError
from control.future import Future
from control.runtime import job as runtime
from control.runtime.process import Process
from control.services.courier import Courier
from control.services.requests import Attempt, Binding, Request
from control.services.retry import may_retry
from control.services.router import Router, Seat, Tally
from control.services.table import ReplicaState, Table

if TYPE_CHECKING:
    from control.services.keeper import Keeper
    from control.views import ActorMesh

_SOMEBODY = (0,)
"""The numbers of the replicas of a service that has ended: a request to any of them says so."""

_courier = Courier()
"""Sends what is sent again, and what has waited for a replica, for all services."""

_callers: weakref.WeakValueDictionary[int, Caller] = weakref.WeakValueDictionary()
_callers_lock = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """What anybody needs to call a service; it may be sent anywhere in the job.

    Attributes:
        name: of the service.
        keeper: the actor that keeps it.
        interface: of the replicas' actors.
        procs: see `ServiceOptions.procs`.
        retries: see `ServiceOptions.retries`.
    """

    name: str
    keeper: ActorMesh[Keeper]
    interface: ActorInterface
    procs: int
    retries: int


def caller_of(address: Address) -> Caller:
    """The caller of this process for a service; it is made when it is asked for first."""
    with _callers_lock:
        caller = _callers.get(address.keeper.uid)
        if caller is not None:
            return caller
        caller = _callers[address.keeper.uid] = Caller(address)
    caller.watch()
    return caller


class Caller:
    """Sends requests of this process to the replicas of a service, and sees them through. For any thread.

    Where there is no replica to send to, requests wait here. So one that dies before it was up has had none.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._process = runtime.current()
        self._id = secrets.token_hex(8)
        self._lock = threading.RLock()  # a session that is collected is closed, wherever that happens
        self._router = Router()
        self._version = -1
        self._parked: list[Request] = []
        self._is_flushing = False
        self._when_known: list[Callable[[tuple[int, ...]], None]] = []
        self._ended: ServiceEndedError | None = None

    # Requests

    def submit(self, request: Request) -> None:
        """Send a request to a replica, or keep it until there is one.

        Raises:
            BackpressureError: the replica is too far behind, or too many requests wait for one.
        """
        while (seat := self._seat_for(request)) is not None:
            if self._send(request, seat):
                return

    def when_known(self, act: Callable[[tuple[int, ...]], None]) -> None:
        """Call ``act`` with the numbers of all replicas, now or as soon as they are known here."""
        with self._lock:
            if self._version < 0 and self._ended is None:
                self._when_known.append(act)
                return
            numbers = self._router.numbers or _SOMEBODY
        act(numbers)

    def bind(self, binding: Binding) -> None:
        """Have a session take its replica now, if there is one."""
        with self._lock:
            binding.bind(self._router)

    def unbind(self, binding: Binding) -> None:
        """End a session; may be called again."""
        with self._lock:
            was_closed, binding.is_closed = binding.is_closed, True
            seat = binding.seat
            if was_closed or seat is None:
                return
            seat.sessions -= 1
            somebody_waits = seat.state is ReplicaState.DRAINING
        if somebody_waits:
            self._address.keeper.tell.call_one(self._id, self._report())

    def answered(self, attempt: Attempt, *, is_error: bool) -> bool:
        """Take note of an answer; whether it is the first thing that is heard of the attempt."""
        elapsed = perf_counter_ns() - attempt.begin_ns
        seat = attempt.seat
        tally = seat.tally
        with self._lock:
            if attempt.is_over:
                return False
            attempt.is_over = True
            seat.outstanding -= 1
            tally.done += 1
            tally.errors += is_error
            tally.total_ns += elapsed
            tally.longest_ns = max(tally.longest_ns, elapsed)
            return True

    def failed(self, attempt: Attempt, error: SupervisionError, *, is_dead: bool) -> None:
        """Take note that no answer will come, and have the request sent again where that is safe."""
        seat, request = attempt.seat, attempt.request
        with self._lock:
            if attempt.is_over:
                return
            attempt.is_over = True
            seat.outstanding -= 1
            seat.tally.lost += 1
            if is_dead:
                self._router.lose(seat)
        if not request.is_bound() and may_retry(request.spec, error, request.attempts, self._address.retries):
            _courier.submit(lambda: self._submit_again(request))
        else:
            request.fail(request.lost(self._address.name, seat, error) if is_dead else error)

    def _seat_for(self, request: Request) -> Seat | None:
        """The replica for a request, which counts as outstanding there from now on; None if the request is kept."""
        with self._lock:
            seat = None
            if self._ended is None and self._process.closing:
                self._ended = self._end_of_job()
            if self._ended is not None:
                request.fail(self._ended)
                return None
            if not self._is_flushing and self._version >= 0:  # nothing overtakes what waits
                seat = self._pick(request)
                if request.future.done():
                    return None
            if seat is None:
                if len(self._parked) >= bounds.settings().max_unhandled:
                    raise BackpressureError(
                        f"{len(self._parked)} requests wait already for a replica of {self._address.name}"
                    )
                self._parked.append(request)
            return seat

    def _pick(self, request: Request) -> Seat | None:
        try:
            seat = request.pick(self._address.name, self._router)
        except SupervisionError as error:
            request.fail(error)
            return None
        if seat is not None:
            seat.outstanding += 1
        return seat

    def _send(self, request: Request, seat: Seat) -> bool:
        """Send a request to a replica; False if that is known to be dead, so that nothing was sent."""
        process = self._process
        if _is_unreachable(process, seat):
            with self._lock:
                seat.outstanding -= 1
                self._router.lose(seat)
            return False
        request.attempts += 1
        attempt = Attempt(self, request, seat)
        try:
            request.send(process, attempt)
        except BaseException:
            with self._lock:
                if not attempt.is_over:
                    attempt.is_over = True
                    seat.outstanding -= 1
            raise
        return True

    def _submit_again(self, request: Request) -> None:
        try:
            self.submit(request)
        except ControlError as error:
            request.fail(error)

    # News of the keeper

    def watch(self) -> None:
        """Ask the keeper to tell what has changed, once something has; and tell it what has been seen from here."""
        news: Future[Table] = self._address.keeper.watch.call_one(self._id, self._version, self._report())
        here = weakref.ref(self)
        news.add_done_callback(lambda told: _tell(here, told))

    def told(self, table: Table) -> None:
        """Take the service as it is now."""
        with self._lock:
            waiting, self._when_known = self._when_known, []
            self._router.update(table)
            self._version = table.version
            has_work = bool(self._parked) and not self._is_flushing
            self._is_flushing = self._is_flushing or has_work
        for act in waiting:
            _courier.submit(lambda act=act: act(self._router.numbers))  # type: ignore[misc]
        if has_work:
            _courier.submit(self._flush)

    def end(self, error: ControlError) -> None:
        """The service is no more."""
        failure = error.failure if isinstance(error, SupervisionError) else None
        reason = f"has failed: {failure.root_cause().message}" if failure else "has ended"
        ended = ServiceEndedError(f"service {self._address.name} {reason}", failure, is_unhandled=True)
        with self._lock:
            self._ended = ended
            parked, self._parked = self._parked, []
            waiting, self._when_known = self._when_known, []
        for request in parked:
            request.fail(ended)
        for act in waiting:
            act(_SOMEBODY)

    def is_part_of_a_job(self) -> bool:
        """Whether there is still somebody to ask for news."""
        return not self._process.closing

    def _end_of_job(self) -> ServiceEndedError:
        return ServiceEndedError(f"service {self._address.name} has ended with its job", is_unhandled=True)

    def _flush(self) -> None:
        """Send what has waited, in its order."""
        while True:
            with self._lock:
                ready = []
                waiting, self._parked = self._parked, []
                for request in waiting:
                    seat = self._pick(request)
                    if seat is not None:
                        ready.append((request, seat))
                    elif not request.future.done():
                        self._parked.append(request)
                if not ready:
                    self._is_flushing = False
                    return
            for request, seat in ready:
                self._send_parked(request, seat)

    def _send_parked(self, request: Request, seat: Seat) -> None:
        try:
            if not self._send(request, seat):
                with self._lock:
                    self._parked.insert(0, request)
        except ControlError as error:
            request.fail(error)

    def _report(self) -> dict[int, Tally]:
        with self._lock:
            return {number: dataclasses.replace(tally) for number, tally in self._router.tallies().items()}


def _is_unreachable(process: Process, seat: Seat) -> bool:
    link = process.transport.find(seat.entry.root_members[0].id)
    return link is not None and link.lost is not None


def _tell(here: weakref.ref[Caller], news: Future[Table]) -> None:
    caller = here()
    if caller is None:
        return
    try:
        table = news.get(0)
    except ControlError as error:
        caller.end(error)
        return
    caller.told(table)
    caller.watch()
