"""`Caller`: how one process calls one service. It routes by itself; the keeper only tells it of changes."""

from __future__ import annotations

import dataclasses
import heapq
import secrets
import threading
import weakref
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING

from skipper.control.model import settings as bounds
from skipper.control.model.actor import ActorInterface
from skipper.control.model.errors import BackpressureError, ControlError, ServiceEndedError, SupervisionError
from skipper.control.model.future import Future, peek
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.begin_log import BeginView, Fate, ProcessGoneError
from skipper.control.runtime.process import Process
from skipper.control.services.requests import Attempt, Binding, Request
from skipper.control.services.retry import may_retry
from skipper.control.services.retry_thread import Courier
from skipper.control.services.router import Router, Seat, Tally
from skipper.control.services.table import Place, ReplicaState, Table

if TYPE_CHECKING:
    from skipper.control.api.views import ActorMesh
    from skipper.control.services.replica_controller import Keeper

_SOMEBODY = (0,)
"""The numbers of the replicas of a service that has ended: a request to any of them says so."""

_courier = Courier()
"""Sends what is sent again, and what has waited for a replica, for all services."""

_callers: weakref.WeakValueDictionary[int, Caller] = weakref.WeakValueDictionary()
_callers_lock = threading.Lock()

_needed: set[Caller] = set()
"""Those with which requests wait, so that they stay although nobody else may hold them or their service."""


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

    Where there is no replica to send to, requests wait here. So one that dies before it was up has had none. Requests
    that a replica handles one at a time wait here, too, while all replicas have enough to do: so the oldest is the
    next, also if it has been with a replica that died, and little is with any replica when that dies.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._process = runtime.current()
        self._id = secrets.token_hex(8)
        self._lock = threading.RLock()  # a session that is collected is closed, wherever that happens
        self._router = Router(self._prepare)
        self._version = -1
        self._parked: list[Request] = []
        self._is_flushing = False
        self._waiting: list[Request] = []
        """Those that are handled one at a time, as a heap: the oldest first."""
        self._is_dispatching = False
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
                self._stay_if_needed()
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
            if attempt.request.in_turn:
                self._router.answered(seat, attempt.begin_ns, attempt.begin_ns + elapsed)
            self._release(attempt)
            tally.done += 1
            tally.errors += is_error
            tally.total_ns += elapsed
            tally.longest_ns = max(tally.longest_ns, elapsed)
            return True

    def process_lost(self, attempt: Attempt, error: SupervisionError) -> None:
        """Take note that the replica is gone, and find out whether it had begun the request."""

        def judge() -> None:
            fate, request = attempt.fate(), attempt.request
            if fate is Fate.UNTOUCHED:
                request.attempts -= 1
            # What is in a request may kill whoever opens it: it must not kill them all.
            is_harmless = fate is Fate.UNTOUCHED or request.attempts <= self._address.retries
            error.is_unhandled = fate is not Fate.PERHAPS_BEGUN and is_harmless
            self.failed(attempt, error, is_dead=True)

        begins = attempt.seat.begins
        if begins is None or begins.is_final():
            judge()
            return
        with self._lock:
            self._router.lose(attempt.seat)
        _courier.submit(judge)

    def failed(self, attempt: Attempt, error: SupervisionError, *, is_dead: bool) -> None:
        """Take note that no answer will come, and have the request sent again where that is safe."""
        seat, request = attempt.seat, attempt.request
        with self._lock:
            if attempt.is_over:
                return
            seat.tally.lost += 1
            if is_dead:
                self._router.lose(seat)
            self._release(attempt)
        if not request.is_bound() and may_retry(request.spec, error, request.attempts, self._address.retries):
            self._hand_on(request)
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
            is_full = len(self._parked) + len(self._waiting) >= bounds.settings().max_unhandled
            if self._version < 0:
                pass
            elif not request.in_turn:
                if not self._is_flushing:  # nothing overtakes what waits
                    seat = self._pick(request)
            elif is_full or not self._waiting:
                seat = self._pick(request, in_turn=not is_full)  # if here is no room, the replica has the sender wait
            if seat is None and not request.future.done():
                if is_full:
                    count = len(self._parked) + len(self._waiting)
                    raise BackpressureError(f"{count} requests wait already for a replica of {self._address.name}")
                self._keep(request)
            return seat

    def _keep(self, request: Request) -> None:
        if request.in_turn:
            heapq.heappush(self._waiting, request)
        else:
            self._parked.append(request)
        self._stay_if_needed()

    def _stay_if_needed(self) -> None:
        if self._parked or self._waiting or self._when_known:
            _needed.add(self)
        else:
            _needed.discard(self)

    def _pick(self, request: Request, *, in_turn: bool = False) -> Seat | None:
        try:
            seat = request.pick(self._address.name, self._router, in_turn=in_turn)
        except SupervisionError as error:
            request.fail(error)
            return None
        if seat is not None:
            seat.outstanding += 1
            seat.in_turn += request.in_turn
        return seat

    def _release(self, attempt: Attempt) -> None:
        """Count an attempt out; the next request may take its place."""
        attempt.is_over = True
        self._count_out(attempt.request, attempt.seat)

    def _count_out(self, request: Request, seat: Seat) -> None:
        seat.outstanding -= 1
        seat.in_turn -= request.in_turn
        if self._waiting:
            self._begin_dispatch()

    def _begin_dispatch(self) -> None:
        if self._waiting and not self._is_dispatching:
            self._is_dispatching = True
            _courier.submit(self._dispatch)

    def _send(self, request: Request, seat: Seat) -> bool:
        """Send a request to a replica; False if that is known to be dead, so that nothing was sent."""
        process = self._process
        if _is_unreachable(process, seat):
            with self._lock:
                self._router.lose(seat)
                self._count_out(request, seat)
            return False
        request.attempts += 1
        attempt = Attempt(self, request, seat)
        try:
            request.send(process, attempt)
        except BaseException:
            with self._lock:
                if not attempt.is_over:
                    self._release(attempt)
            raise
        return True

    def _hand_on(self, request: Request) -> None:
        """Have a request sent to another replica; it has been accepted, and waits for however many others wait."""
        with self._lock:
            if request.in_turn and self._ended is None and not self._process.closing:
                self._keep(request)
                self._begin_dispatch()
                return
        _courier.submit(lambda: self._submit_again(request))

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
            self._begin_dispatch()
            self._stay_if_needed()
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
            kept = [*self._parked, *sorted(self._waiting)]
            self._parked, self._waiting = [], []
            asking, self._when_known = self._when_known, []
            self._stay_if_needed()
        for request in kept:
            request.fail(ended)
        for act in asking:
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
                    self._stay_if_needed()
                    return
            for request, seat in ready:
                if not self._send_kept(request, seat):
                    with self._lock:
                        self._parked.insert(0, request)

    def _dispatch(self) -> None:
        """Send what waits for its turn, the oldest first, as long as replicas have too little to do."""
        while True:
            with self._lock:
                seat = self._pick(self._waiting[0], in_turn=True) if self._waiting else None
                if seat is None:
                    self._is_dispatching = False
                    self._stay_if_needed()
                    return
                request = heapq.heappop(self._waiting)
            if not self._send_kept(request, seat):
                with self._lock:
                    heapq.heappush(self._waiting, request)

    def _send_kept(self, request: Request, seat: Seat) -> bool:
        """Send what has waited; False if its replica is known to be dead."""
        try:
            return self._send(request, seat)
        except Exception as error:  # noqa: BLE001  (whoever waits is told, and those behind it go on)
            request.fail(error)
            return True

    def _prepare(self, seat: Seat, place: Place) -> None:
        """Map what a replica writes down of the requests that it begins, before it gets any from here."""
        if place.begins is None:
            return
        try:
            seat.begins = BeginView(place.begins, self._process.me.id)
        except ProcessGoneError:
            seat.is_lost = True
        except OSError:
            return  # on another machine: requests that are with it when it dies may have been handled

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
        table = peek(news)
    except ControlError as error:
        caller.end(error)
        return
    caller.told(table)
    caller.watch()
