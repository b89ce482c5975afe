"""`ServiceClient`: how one process calls one service. It routes by itself; the controller only reports changes."""

from __future__ import annotations

import dataclasses
import heapq
import logging
import queue
import secrets
import threading
import weakref
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING

from skipper.control.api.service import ReplicaState
from skipper.control.model import settings as bounds
from skipper.control.model.actor import ActorInterface
from skipper.control.model.endpoint_spec import EndpointSpec
from skipper.control.model.errors import (
    BackpressureError,
    ControlError,
    ReplicaLostError,
    ServiceEndedError,
    SupervisionError,
)
from skipper.control.model.future import Future, peek
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.begin_log import BeginView, Fate, ProcessGoneError
from skipper.control.runtime.process import Process
from skipper.control.services.requests import RequestAttempt, ServiceRequest, SessionBinding
from skipper.control.services.router import KnownReplica, Router, Tally
from skipper.control.services.table import ReplicaSlot, ReplicaTable

if TYPE_CHECKING:
    from skipper.control.api.views import ActorMesh
    from skipper.control.services.replica_controller import ReplicaController
    from skipper.control.wire.link import Link


_SOMEBODY = (0,)
"""Stands for the replicas of a service that has ended. A request to it ends with an error that says so."""

_IDLE_S = 5.0
"""After this time without a job the thread ends; the next job starts another one."""

_log = logging.getLogger("skipper.control")


class RetryThread:
    """Runs jobs one after another on a daemon thread that runs only while there are jobs.

    Threads that deliver answers must not wait. If an answer makes it necessary to send something, this thread sends it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._is_running = False

    def submit(self, job: Callable[[], object]) -> None:
        """Run a job soon; from any thread. The job may block, and later jobs then wait, too."""
        with self._lock:
            self._jobs.put(job)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="service-retry", daemon=True).start()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:  # noqa: BLE001  (it has others to serve)
                _log.exception("a job of a service's retry thread raised")

    def _next(self) -> Callable[[], object] | None:
        try:
            return self._jobs.get(timeout=_IDLE_S)
        except queue.Empty:
            with self._lock:
                self._is_running = not self._jobs.empty()
                return self._jobs.get() if self._is_running else None


_retry_thread = RetryThread()
"""Serves all services. It sends requests again, and those that have waited for a replica."""

_clients: weakref.WeakValueDictionary[tuple[str, int], ServiceClient] = weakref.WeakValueDictionary()
"""Clients by the id of the process, which differs between jobs, and the number of the service's controller."""

_clients_lock = threading.Lock()

_needed: set[ServiceClient] = set()
"""Clients that have waiting requests. This keeps them alive, even if nothing else refers to them or their service."""


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """What a process needs to call a service. It may be sent anywhere in the job.

    ``controller`` owns the replicas; ``interface`` is that of their actors; ``procs`` and ``retries``: see
    `ServiceOptions`.
    """

    name: str
    controller: ActorMesh[ReplicaController]
    interface: ActorInterface
    procs: int
    retries: int


def client_of(address: Address) -> ServiceClient:
    """The client of this process for a service. The first call makes it."""
    key = runtime.current().me.id, address.controller.uid
    with _clients_lock:
        client = _clients.get(key)
        if client is not None:
            return client
        client = _clients[key] = ServiceClient(address)
    client.watch()
    return client


class ServiceClient:
    """Sends requests of this process to the replicas of a service until each has its answer. For any thread.

    Requests wait here while no replica is up. So a replica that dies before it was up has received none. Requests that
    a replica handles one at a time also wait here while all replicas have enough to do. So the oldest request is sent
    next, even if it was with a replica that has died; and a replica that dies takes few requests with it.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._process = runtime.current()
        self._id = secrets.token_hex(8)
        self._lock = threading.RLock()  # garbage collection closes sessions, on any thread
        self._router = Router(self._prepare)
        self._version = -1
        self._parked: list[ServiceRequest] = []
        self._is_flushing = False
        self._waiting: list[ServiceRequest] = []
        """Requests that a replica handles one at a time, as a heap: the oldest first."""
        self._is_dispatching = False
        self._when_known: list[Callable[[tuple[int, ...]], None]] = []
        self._ended: ServiceEndedError | None = None

    # Requests

    def submit(self, request: ServiceRequest) -> None:
        """Send a request to a replica, or keep it until there is one.

        Raises:
            BackpressureError: the replica is too far behind, or too many requests wait for one.
        """
        while (replica := self._replica_for(request)) is not None:
            if self._send(request, replica):
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

    def bind(self, binding: SessionBinding) -> None:
        """Let a session take its replica now, if there is one."""
        with self._lock:
            binding.bind(self._router)

    def unbind(self, binding: SessionBinding) -> None:
        """End a session; may be called again."""
        with self._lock:
            was_closed, binding.is_closed = binding.is_closed, True
            replica = binding.replica
            if was_closed or replica is None:
                return
            replica.sessions -= 1
            somebody_waits = replica.state is ReplicaState.DRAINING
        if somebody_waits:
            self._address.controller.tell.call_one(self._id, self._report())

    def answered(self, attempt: RequestAttempt, *, is_error: bool) -> bool:
        """Note an answer. Returns whether the attempt was still open."""
        elapsed = perf_counter_ns() - attempt.begin_ns
        replica = attempt.replica
        tally = replica.tally
        with self._lock:
            if attempt.is_over:
                return False
            if attempt.request.in_turn:
                self._router.answered(replica, attempt.begin_ns, attempt.begin_ns + elapsed)
            self._release(attempt)
            tally.done += 1
            tally.errors += is_error
            tally.total_ns += elapsed
            tally.longest_ns = max(tally.longest_ns, elapsed)
            return True

    def process_lost(self, attempt: RequestAttempt, error: SupervisionError) -> None:
        """Note that the replica is gone, and find out whether it had begun the request."""

        def judge() -> None:
            fate, request = Fate.UNTOUCHED if is_untouched else attempt.fate(), attempt.request
            if fate is Fate.UNTOUCHED:
                request.attempts -= 1
            # The content of a request may kill the process that opens it. It must not kill all replicas.
            is_harmless = fate is Fate.UNTOUCHED or request.attempts <= self._address.retries
            error.is_unhandled = fate is not Fate.PERHAPS_BEGUN and is_harmless
            self.failed(attempt, error, is_dead=True)

        link, begins = _link_to(self._process, attempt.replica), attempt.replica.begins
        is_untouched = link is not None and link.lost is not None and not link.has_stood
        if is_untouched or begins is None or begins.is_final():
            judge()
            return
        self._lose(attempt.replica)
        _retry_thread.submit(judge)

    def failed(self, attempt: RequestAttempt, error: SupervisionError, *, is_dead: bool) -> None:
        """Note that no answer will come, and send the request again if that is safe."""
        replica, request = attempt.replica, attempt.request
        with self._lock:
            if attempt.is_over:
                return
            replica.tally.lost += 1
            if is_dead:
                self._lose(replica)
            self._release(attempt)
        if not request.is_bound() and may_retry(request.spec, error, request.attempts, self._address.retries):
            self._hand_on(request)
        else:
            request.fail(request.lost(self._address.name, replica, error) if is_dead else error)

    def _replica_for(self, request: ServiceRequest) -> KnownReplica | None:
        """The replica for a request, which counts as outstanding there from now on. None: the request waits here."""
        with self._lock:
            replica = None
            if self._ended is None and self._process.closing:
                self._ended = self._end_of_job()
            if self._ended is not None:
                request.fail(_of(request, self._ended))
                return None
            is_full = len(self._parked) + len(self._waiting) >= bounds.settings().max_unhandled
            if self._version < 0:
                pass
            elif not request.in_turn:
                if not self._is_flushing:  # no request overtakes those that wait
                    replica = self._pick(request)
            elif is_full or not self._waiting:
                # If there is no room here, the replica makes the sender wait.
                replica = self._pick(request, in_turn=not is_full)
            if replica is None and request.waits_in_vain(self._router):
                request.fail(self._out_of_reach(request))
            if replica is None and not request.future.done():
                if is_full:
                    count = len(self._parked) + len(self._waiting)
                    raise BackpressureError(f"{count} requests already wait for a replica of {self._address.name}")
                self._keep(request)
            return replica

    def _lose(self, replica: KnownReplica) -> None:
        """Send nothing more to a replica, and ask whether the controller has lost it, too, and replaces it."""
        with self._lock:
            self._router.lose(replica)
            if replica.is_asked_about or self._ended is not None:
                return
            replica.is_asked_about = True
        _retry_thread.submit(lambda: self._ask_about(replica))

    def _ask_about(self, replica: KnownReplica) -> None:
        def ask() -> None:
            replaced: Future[bool] = self._address.controller.replaces.call_one(replica.entry.uid)
            replaced.add_done_callback(lambda replaced: self._told_of_lost(replica, replaced))

        _ask_until_there_is_room(ask)

    def _told_of_lost(self, replica: KnownReplica, replaced: Future[bool]) -> None:
        try:
            replica.is_out_of_reach = not peek(replaced)
        except ControlError:
            return  # `watch` reports the end of the service
        if replica.is_out_of_reach:
            _retry_thread.submit(self._give_up)

    def _give_up(self) -> None:
        """End the requests that wait for replicas which only this process cannot reach."""
        with self._lock:
            if not self._router.has_out_of_reach():  # as usual, whoever waits
                self._stay_if_needed()
                return
            kept = [*self._parked, *sorted(self._waiting)]
            lost = {request: None for request in kept if request.waits_in_vain(self._router)}
            self._parked = [request for request in self._parked if request not in lost]
            self._waiting = [request for request in self._waiting if request not in lost]
            heapq.heapify(self._waiting)
            self._stay_if_needed()
        for request in lost:
            request.fail(self._out_of_reach(request))

    def _out_of_reach(self, request: ServiceRequest) -> ReplicaLostError:
        name, number = self._address.name, self._router.numbers[0]
        return ReplicaLostError(
            name,
            number,
            f"{request.spec.name} cannot be sent: this process has lost its connection to every replica of {name} that "
            f"could handle it, though they are up; drain({number}) replaces one by a new one",
            is_unhandled=not request.attempts,
        )

    def _keep(self, request: ServiceRequest) -> None:
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

    def _pick(self, request: ServiceRequest, *, in_turn: bool = False) -> KnownReplica | None:
        try:
            replica = request.pick(self._address.name, self._router, in_turn=in_turn)
        except SupervisionError as error:
            request.fail(error)
            return None
        if replica is not None:
            replica.outstanding += 1
            replica.in_turn += request.in_turn
        return replica

    def _release(self, attempt: RequestAttempt) -> None:
        """Remove an attempt from the counts, so that the next request may take its place."""
        attempt.is_over = True
        self._count_out(attempt.request, attempt.replica)

    def _count_out(self, request: ServiceRequest, replica: KnownReplica) -> None:
        replica.outstanding -= 1
        replica.in_turn -= request.in_turn
        if self._waiting:
            self._begin_dispatch()

    def _begin_dispatch(self) -> None:
        if self._waiting and not self._is_dispatching:
            self._is_dispatching = True
            _retry_thread.submit(self._dispatch)

    def _send(self, request: ServiceRequest, replica: KnownReplica) -> bool:
        """Send a request to a replica. False: the replica is known to be dead, and nothing was sent."""
        process = self._process
        if _is_unreachable(process, replica):
            with self._lock:
                self._lose(replica)
                self._count_out(request, replica)
            return False
        request.attempts += 1
        attempt = RequestAttempt(self, request, replica)
        try:
            request.send(process, attempt)
        except BaseException:
            with self._lock:
                if not attempt.is_over:
                    self._release(attempt)
            raise
        return True

    def _hand_on(self, request: ServiceRequest) -> None:
        """Send a request to another replica. It was accepted before, so no bound refuses it now."""
        with self._lock:
            if request.in_turn and self._ended is None and not self._process.closing:
                self._keep(request)
                self._begin_dispatch()
                return
        _retry_thread.submit(lambda: self._submit_again(request))

    def _submit_again(self, request: ServiceRequest) -> None:
        try:
            self.submit(request)
        except ControlError as error:
            request.fail(error)

    # Reports of the controller

    def watch(self) -> None:
        """Ask the controller to answer with the next change, and send it the counts of this process."""
        here, controller = weakref.ref(self), self._address.controller

        def ask() -> None:
            if (client := here()) is not None:
                news: Future[ReplicaTable] = controller.watch.call_one(client._id, client._version, client._report())
                news.add_done_callback(lambda told: _tell(here, told))

        _ask_until_there_is_room(ask)

    def told(self, table: ReplicaTable) -> None:
        """Note the replicas as they are now."""
        with self._lock:
            waiting, self._when_known = self._when_known, []
            self._router.update(table)
            self._version = table.version
            has_work = bool(self._parked) and not self._is_flushing
            self._is_flushing = self._is_flushing or has_work
            self._begin_dispatch()
            self._stay_if_needed()
        for act in waiting:
            _retry_thread.submit(lambda act=act: act(self._router.numbers))  # type: ignore[misc]
        if has_work:
            _retry_thread.submit(self._flush)

    def end(self, error: ControlError) -> None:
        """End all requests: the service has ended."""
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
            request.fail(_of(request, ended))
        for act in asking:
            act(_SOMEBODY)

    def _end_of_job(self) -> ServiceEndedError:
        return ServiceEndedError(f"service {self._address.name} has ended with its job", is_unhandled=True)

    def _flush(self) -> None:
        """Send the requests that have waited, in their order."""
        while True:
            with self._lock:
                ready = []
                waiting, self._parked = self._parked, []
                for request in waiting:
                    replica = self._pick(request)
                    if replica is not None:
                        ready.append((request, replica))
                    elif not request.future.done():
                        self._parked.append(request)
                if not ready:
                    self._is_flushing = False
                    break
            for request, replica in ready:
                if not self._send_kept(request, replica):
                    with self._lock:
                        self._parked.insert(0, request)
        self._give_up()

    def _dispatch(self) -> None:
        """Send the requests that wait for their turn, the oldest first, while replicas have too little to do."""
        while True:
            with self._lock:
                replica = self._pick(self._waiting[0], in_turn=True) if self._waiting else None
                if replica is None:
                    self._is_dispatching = False
                    break
                request = heapq.heappop(self._waiting)
            if not self._send_kept(request, replica):
                with self._lock:
                    heapq.heappush(self._waiting, request)
        self._give_up()

    def _send_kept(self, request: ServiceRequest, replica: KnownReplica) -> bool:
        """Send a request that has waited. False: its replica is known to be dead."""
        try:
            return self._send(request, replica)
        except Exception as error:  # noqa: BLE001  (the request that waits gets it, and later ones continue)
            request.fail(error)
            return True

    def _prepare(self, replica: KnownReplica, slot: ReplicaSlot) -> None:
        """Map the log of begun requests of a replica, before it gets any request from here."""
        if slot.begins is None:
            return
        try:
            replica.begins = BeginView(slot.begins, self._process.me.id)
        except ProcessGoneError:
            replica.is_lost = True
        except OSError:
            return  # it is on another machine: what it had begun cannot be read here when it dies

    def _report(self) -> dict[int, Tally]:
        with self._lock:
            return {number: dataclasses.replace(tally) for number, tally in self._router.tallies().items()}


def _link_to(process: Process, replica: KnownReplica) -> Link | None:
    return process.transport.find(replica.entry.root_members[0].id)


def _is_unreachable(process: Process, replica: KnownReplica) -> bool:
    link = _link_to(process, replica)
    return link is not None and link.lost is not None


def _ask_until_there_is_room(ask: Callable[[], object]) -> None:
    """Ask the controller; if it has no room for the question for long, ask again, since nobody else would."""
    try:
        ask()
    except BackpressureError:
        _retry_thread.submit(lambda: _ask_until_there_is_room(ask))


def _tell(here: weakref.ref[ServiceClient], news: Future[ReplicaTable]) -> None:
    client = here()
    if client is None:
        return
    try:
        table = peek(news)
    except ControlError as error:
        client.end(error)
        return
    client.told(table)
    client.watch()


def _of(request: ServiceRequest, ended: ServiceEndedError) -> ServiceEndedError:
    """The end of a service as the error of one request. A replica that has died since may have handled the request."""
    return ServiceEndedError(ended.message, ended.failure, is_unhandled=not request.attempts)


def may_retry(spec: EndpointSpec, error: SupervisionError, attempts: int, limit: int) -> bool:
    """Whether a request that ended in ``error`` may go to another replica.

    It may, any number of times, if it was certainly not handled. If its endpoint is `idempotent`, it also may up to a
    limit: a request that kills the process that handles it would otherwise kill all replicas, one after another.
    """
    return error.is_unhandled or (spec.is_idempotent and attempts <= limit)
