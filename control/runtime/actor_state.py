"""`ActorState`: one actor of this process, from its construction to its end, whatever kind of thread runs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic as _now
from typing import TYPE_CHECKING, Any

from skipper.control.model import forked
from skipper.control.model.actor import ActorBase, ActorInterface, interface_of
from skipper.control.model.endpoint_spec import WRAPPED
from skipper.control.model.errors import ActorError, ControlError, StopTimeoutError, SupervisionError
from skipper.control.model.exception_text import describe, summarize
from skipper.control.model.failure import FailureKind, MeshFailure
from skipper.control.model.future import Future, Promise, raising
from skipper.control.model.shape import Point
from skipper.control.runtime import tracing
from skipper.control.runtime.context import context_class, current_context, new_instance
from skipper.control.runtime.interfaces import OwnedMeshes
from skipper.control.runtime.interruption import is_of_users
from skipper.control.runtime.latencies import Latencies
from skipper.control.runtime.messages import ActorRef, Mail, OwnerRef, ReplyAddress, SpawnRequest
from skipper.control.runtime.port import Port, refuse_for
from skipper.control.runtime.replies import first_exception, pack_exception, refuse
from skipper.control.runtime.stops import OWNED, Bound, Stage
from skipper.control.wire.messages import Call, Kind, Payload
from skipper.control.wire.payload import pack, unpack

if TYPE_CHECKING:
    from skipper.control.runtime.begin_log import BeginAddress, BeginLog
    from skipper.control.runtime.executor import Executor
    from skipper.control.runtime.flow_control import Flow
    from skipper.control.runtime.history import Event, FaultHistory
    from skipper.control.runtime.interfaces import Actors, OwnedMesh, Owners, Ports, Replier
    from skipper.control.runtime.process_state import ProcessState
    from skipper.control.runtime.stops import Stops

_log = logging.getLogger("skipper.control")

_unpacking = threading.Lock()
"""Held while a class is unpacked, which imports modules. If two threads enter a circle of imports at different modules,
Python's import system can raise an error."""

_ARGUMENTS = "the arguments"
_RESULT = "the result"


class ActorEndedError(BaseException):
    """Unwinds what a sync actor runs when it has failed, or its time to stop is up. Never leaves the runtime."""


@dataclass(frozen=True, slots=True)
class ActorHost:
    """What the actors of one process need from it.

    Attributes:
        state: of the process.
        actors: the table of its actors.
        stops: keeps the bounds of actors that end.
        flow: counts the messages that are handled.
        replier: answers messages.
        owners: get the failures.
        history: of what has gone wrong.
        ports: where answers arrive.
    """

    state: ProcessState
    actors: Actors[ActorState]
    stops: Stops
    flow: Flow
    replier: Replier
    owners: Owners
    history: FaultHistory
    ports: Ports


class ActorProgress:
    """What an actor is doing and has done. Its own thread writes this, any reads it.

    Attributes:
        current: the message that it handles.
        begun_s: when it began that, or its `step`.
        step: what it does besides handling messages: its construction, or a part of its end.
        beside: what concurrent endpoints are handling, besides the current message, and since when.
        born_s: when it was spawned.
        handled: how many messages it has handled, whatever their outcome.
        errors: how many of them ended in an exception.
        last_error: the latest of these.
        latencies: how long its endpoints took lately.
    """

    __slots__ = (
        "_told",
        "begun_s",
        "beside",
        "born_s",
        "current",
        "errors",
        "handled",
        "last_error",
        "latencies",
        "step",
    )

    def __init__(self) -> None:
        self.current: Mail | None = None
        self.begun_s = 0.0
        self.step = ""
        self.beside: list[tuple[Mail, float]] = []
        self.born_s = _now()
        self.handled = 0
        self.errors = 0
        self.last_error: Event | None = None
        self.latencies = Latencies()
        self._told: list[Mail] = []
        """Unfinished messages whose senders have been told."""

    def begin(self, step: str) -> None:
        """Note what it does besides handling messages; empty: nothing."""
        self.begun_s, self.step = _now(), step

    def failed(self, error: Event) -> None:
        """Note an exception."""
        self.errors += 1
        self.last_error = error

    def unfinished(self) -> list[Mail]:
        """The messages that it handles, each once: their senders are told that they will not be finished."""
        found = []
        for mail in (self.current, *(mail for mail, _ in self.beside)):
            if mail is not None and not any(mail is told for told in self._told):
                self._told.append(mail)
                found.append(mail)
        return found

    def handling(self) -> list[tuple[str, float]]:
        """The endpoints that it runs, each with the seconds since it was begun."""
        begun = [] if (current := self.current) is None else [(current, self.begun_s)]
        return [(mail.message.method.removesuffix(WRAPPED), _now() - since) for mail, since in (*begun, *self.beside)]

    def doing(self) -> list[tuple[str, float]]:
        """Its step, or what it handles, with the seconds since that was begun."""
        return [(self.step, _now() - self.begun_s)] if self.step else self.handling()


class ActorState:
    """One actor of this process.

    The coroutines of this class run on the actor's own thread: an async actor's event loop runs them, a sync actor's
    thread drives them through, since nothing in them waits then.
    """

    def __init__(
        self,
        host: ActorHost,
        request: SpawnRequest,
        rank: int,
        body: Payload,
        new_executor: Callable[[ActorState], Executor],
        *,
        asked_for: bool = False,
    ) -> None:
        self._host = host
        self._flow = host.flow
        self._replier = host.replier
        self.uid = request.uid
        self.name = request.name
        self.rank = Point(rank, request.extent)
        self.owner: OwnerRef | None = request.owner
        self.ref = ActorRef(host.state.me, request.uid, request.name, self.rank)
        self.actor_id = self.ref.actor_id
        self.meshes = OwnedMeshes()
        self.failure: MeshFailure | None = None
        self.ready: Promise[None] = Promise()
        """Ends when ``__init__`` has returned; with its error if it raised."""
        self.ended: Promise[None] = Promise()
        """Ends when the actor is gone and everything that it owned is, too."""
        self.over: Promise[MeshFailure | None] = Promise()
        """Ends with the failure when the actor has failed, or with None when it has been stopped and is gone."""
        self.is_cut_off = False
        """Whether what it handles is given up: it has failed, or most of its time to stop has passed."""
        self.bound: Bound | None = None
        """When it has to end; None while it is neither stopped nor failed."""
        self.winds_up: Promise[None] = Promise()
        """Ends when it has handled its last message, and its cleanup begins."""
        self.begins: BeginLog | None = None
        """The log of what it begins to handle, which others read after its death; None until a process asks for one."""
        self.instance = new_instance(self, request.creator)
        self._new_context = context_class()
        self.context = self._new_context(self.instance, rank, request.extent)
        """What `context` returns while no message is being handled."""
        self.failures: deque[MeshFailure] = deque()
        self._body: Payload = body
        self._asked_for = asked_for
        self._actor: ActorBase | None = None
        self._interface: ActorInterface | None = None
        self.progress = ActorProgress()
        self._cut_at = ""
        """What it did when it was cut short."""
        self._unanswered: weakref.WeakKeyDictionary[Port[Any], None] = weakref.WeakKeyDictionary()
        """Ports that endpoints have been given for their answers, in that order."""
        self.executor = new_executor(self)
        """The thread that runs it, once it has been started."""

    def answer_dead(self, mail: Mail) -> None:
        """Tell the sender of a message that the message came too late."""
        refuse(self._flow, self._replier, mail, self.end_reason(), self.failure)

    def _answer_unfinished(self) -> None:
        """Tell the callers whose messages were delivered and will not be finished."""
        for mail in self.progress.unfinished():
            refuse(self._flow, self._replier, mail, self.end_reason(), self.failure, delivered=True)

    def end_with(self, failure: MeshFailure | None) -> None:
        """Note that it takes no more messages: it has been stopped, or has failed. For the table, under its lock."""
        self.failure = failure
        self.is_cut_off = failure is not None

    def bind_to(self, bound: Bound, *, cut_now: bool) -> Bound:
        """Bound its end. If it has a bound already, the sooner time counts. Returns the valid bound. For `Stops`."""
        if self.bound is None:
            self.bound = bound
        else:
            self.bound.tighten(bound)
        if cut_now:
            self.bound.cut_s = bound.began_s
        return self.bound

    def log_begins(self) -> BeginAddress:
        """Log what it begins to handle from now on; returns where the log is."""
        from skipper.control.runtime.begin_log import BeginLog

        if self.begins is None:
            self.begins = BeginLog()
        return self.begins.address

    def has_failed(self) -> bool:
        """Whether the actor has ended in a failure; another thread may cause that at any moment."""
        return self.failure is not None

    def end_reason(self) -> str:
        """Why this actor no longer answers."""
        if self.failure is not None:
            return f"actor {self.ref} has failed: {self.failure.headline()}"
        return f"actor {self.ref} has been stopped" + (", and did not stop in time" if self.is_cut_off else "")

    async def construct(self, *, is_async: bool) -> None:
        """Make the actor object."""
        body, self._body = self._body, ()
        self.progress.begin("__init__")
        self._host.stops.watch_construction(self)
        try:
            with _unpacking:
                cls, *given = unpack(body, "the class and the arguments of this actor")
            self._interface = interface_of(cls)
            with contextlib.ExitStack() as until_constructed:
                args, kwargs = given if len(given) == 2 else until_constructed.enter_context(given[0]())
                # Two steps: the object has to exist to supervise what ``__init__`` has spawned and waits for.
                self._actor = cls.__new__(cls, *args, **kwargs)
                self._actor.__init__(*args, **kwargs)  # type: ignore[misc]
                if forked.original:
                    forked.leave()
        except ActorEndedError:
            self._actor = None  # it failed for another reason while it was in __init__, or its time was up
        except BaseException as error:  # noqa: BLE001  (whatever a constructor raises is the actor's failure)
            if forked.original:
                forked.leave(error)
            self._actor = None  # half made: there is nothing to clean up
            summary, trace = summarize(error), describe(error)
            self._note_error("__init__", error)
            if self._asked_for:
                self.owner = None  # callers that wait for `ready` get the error, not the owner
            self.fail(FailureKind.CONSTRUCTION, f"{self.label}: __init__ raised {summary}", trace, error=error)
            self.ready.set_exception(ActorError(self.actor_id, "__init__", summary, trace, error))
        self._host.stops.constructed(self)
        self.progress.begin("")
        if self._actor is not None and not self.is_cut_off:
            self.ready.set_result(None)
        else:
            self._refuse_ready()

    def _refuse_ready(self) -> None:
        """Tell the callers that wait for the construction, if they do not know yet."""
        self.ready.set_exception(SupervisionError(self.end_reason(), self.failure))

    def give_up_construction(self, bound_s: float) -> None:
        """Fail because ``__init__`` does not return. On the loop thread."""
        if self.ready.done():
            return
        if self._asked_for:
            self.owner = None
        message = f"{self.label}: __init__ has not returned within {bound_s:g} s (init_timeout_s){self._where()}"
        self.fail(FailureKind.CONSTRUCTION, message, self._stack())
        self._refuse_ready()
        self._host.stops.within(self, self._host.state.settings.stop_timeout_s, cut_now=True)

    def never_begin(self, reason: str) -> None:
        """End an actor that has no thread; from any thread."""
        if self._asked_for:
            self.owner = None  # a caller waits for `ready`
        self.fail(FailureKind.ABORT, f"{self.label} could not be constructed: {reason}")
        self.ready.set_exception(SupervisionError(self.end_reason(), self.failure))
        self.bury()

    @property
    def label(self) -> str:
        """The actor as error messages name it."""
        return f"actor {self.name}{self.rank!r} in {self._host.state.me.name}"

    def is_concurrent(self, mail: Mail) -> bool:
        """Whether this message is for a concurrent endpoint: the messages behind it need not wait for it."""
        assert self._interface is not None  # messages are handled once the actor is constructed
        spec = self._interface.endpoints.get(mail.message.method.removesuffix(WRAPPED))
        return spec is not None and spec.concurrent

    async def handle_beside(self, mail: Mail) -> None:
        """Run one concurrent endpoint."""
        if self.is_cut_off:
            self.answer_dead(mail)
            return
        entry = (mail, _now())
        self.progress.beside.append(entry)
        try:
            if tracing.tracer is None:
                await self._answer(mail)
            else:
                with tracing.tracer.serving(self, mail):
                    await self._answer(mail)
        finally:
            self.progress.beside.remove(entry)
        if not self.is_cut_off:
            self.progress.latencies.took(mail.message.method, _now() - entry[1])

    async def handle(self, mail: Mail) -> None:
        """Run one endpoint."""
        if self.is_cut_off:
            self.answer_dead(mail)
            return
        progress = self.progress
        begun_s = progress.begun_s = _now()
        progress.current = mail
        if tracing.tracer is None:
            await self._answer(mail)
        else:
            with tracing.tracer.serving(self, mail):
                await self._answer(mail)
        if not self.is_cut_off:
            progress.current = None
            progress.latencies.took(mail.message.method, _now() - begun_s)

    async def _answer(self, mail: Mail) -> None:
        call = mail.message
        assert isinstance(call, Call)  # the process itself handles requests
        assert self._interface is not None  # messages are handled once the actor is constructed
        assert self._actor is not None
        if self.begins is not None:
            self.begins.take(mail)
        current_context.set(self._new_context(self.instance, call.rank, call.extent))
        port: Port[Any] | None = None
        has_begun = False
        try:
            spec = self._interface.find(call.method)
            if spec.is_wrapped:
                with _unpacking:  # the payload contains code
                    args, kwargs = unpack(call.payload, _ARGUMENTS)
            else:
                args, kwargs = unpack(call.payload, _ARGUMENTS)
            method = getattr(self._actor, spec.name)
            has_begun = True
            if self.begins is not None:
                self.begins.begin()
            if spec.explicit_response_port:
                number = call.reply_to if call.wants_reply else 0
                port = Port(ReplyAddress(mail.sender, number, call.rank), True, owed=bool(number))
                self._unanswered[port] = None
                result = method(port, *args, **kwargs)
            elif spec.is_wrapped:
                result = args[0](method, *args[1:], **kwargs)
            else:
                result = method(*args, **kwargs)
            if spec.is_async:
                result = await result
            if forked.original:
                forked.leave()
            if self.is_cut_off:
                return  # its caller has been told, and an interruption may be on its way to this thread
            if call.wants_reply and port is None:
                self._replier.reply(mail, Kind.REPLY, pack(result, lend=True, name=_RESULT))
        except ActorEndedError:
            return
        except BaseException as error:  # noqa: BLE001  (whatever an endpoint raises is its caller's, or its actor's end)
            if forked.original:
                forked.leave(error)
            if self.is_cut_off:
                return
            self._note_error(call.method, error)
            consequence = _consequence(error, port, wants_reply=call.wants_reply)
            if (consequence and has_begun) or not call.reply_to:
                message = f"{self.label}: {call.method} raised {summarize(error)}, {consequence}"
                self.fail(FailureKind.EXCEPTION, message, describe(error), error=error)
            else:
                packed = pack_exception(error, actor_id=self.actor_id, endpoint=call.method)
                self._replier.reply(mail, Kind.FAILURE, packed)
        self.progress.handled += 1
        if not self.is_cut_off:  # otherwise it has been refused, which counts it, too
            self._flow.handled(mail)

    def activity(self) -> str:
        """What it is doing, for people."""
        running = [f"{method} for {seconds:.1f} s" for method, seconds in self.progress.handling()]
        waiting = self.executor.depth()
        if not self.ready.done():
            doing = f"it has been in __init__ for {_now() - self.progress.born_s:.1f} s"
        elif running:
            doing = f"it has been running {', '.join(running)}"
        elif self._host.actors.get(self.uid) is None:
            doing = "it is ending"
        else:
            doing = "it runs nothing at the moment: if the call was delivered, the holder of its port has not answered"
        return (
            f"{doing}; {waiting} message{'s' * (waiting != 1)} wait{'s' * (waiting == 1)} for it" if waiting else doing
        )

    @property
    def class_name(self) -> str:
        """The name of the actor's class; empty where the actor is not constructed yet."""
        return self._interface.class_name if self._interface is not None else ""

    def _note_error(self, method: str, error: BaseException) -> None:
        if tracing.tracer is not None:
            tracing.tracer.failed(error)
        who = f"{self.ref}.{method.removesuffix(WRAPPED)}"
        self.progress.failed(self._host.history.failed(who, error))

    async def supervise(self, *, is_async: bool) -> None:
        """Handle the failures of owned meshes."""
        while self.failures and not self.is_cut_off:
            failure = self.failures.popleft()
            try:
                handled = self._actor.__supervise__(failure) if self._actor is not None else False
                if is_async and asyncio.iscoroutine(handled):
                    handled = await handled
                if forked.original:
                    forked.leave()
            except BaseException as error:  # noqa: BLE001  (raising is one way not to handle a failure)
                if forked.original:
                    forked.leave(error)
                if not self.is_cut_off:
                    message = f"{self.label}: __supervise__ raised {summarize(error)}"
                    self.fail(FailureKind.EXCEPTION, message, describe(error), cause=failure, error=error)
                return
            if handled:
                self._host.owners.handled(failure)
            else:
                self.fail(
                    FailureKind.OWNED, f"{self.label} did not handle a failure of {failure.mesh_name!r}", cause=failure
                )

    def own(self, mesh: OwnedMesh) -> None:
        """Take a mesh that this actor has just spawned."""
        self.meshes.add(mesh)

    def owned_failed(self, failure: MeshFailure) -> None:
        """Take note of the failure of an owned mesh; from any thread."""
        self.failures.append(failure)
        self.executor.wake()

    def fail(
        self,
        kind: FailureKind,
        message: str,
        details: str = "",
        cause: MeshFailure | None = None,
        error: BaseException | None = None,
    ) -> None:
        """End this actor with a failure, which its owner gets; from any thread."""
        exception = "" if error is None else first_exception(error)
        failure = MeshFailure(self.name, self.actor_id, self.rank, kind, message, details, cause, exception=exception)
        if not self._host.actors.end(self, failure):
            return
        self._host.owners.report(self.owner, failure)
        self.over.settle_by(lambda: failure)
        self._host.stops.within(self, self._host.state.settings.stop_timeout_s)
        self.cut_off()

    def cut_off(self) -> None:
        """Make it handle nothing more, end what it does, and answer its callers at once.

        From any thread: the actor's own thread may be busy for a long time.
        """
        if self.is_cleanup_cut() or (self.failure is None and not (self._cut_at or self.winds_up.done())):
            self._cut_at = self._doing()
        self.is_cut_off = True
        self._answer_unfinished()
        if self.failure is None or self.failure.kind is not FailureKind.CONSTRUCTION:  # it has its own error
            self._refuse_ready()
        self.executor.drain()
        self.executor.unwind()

    def orphan(self, reason: str) -> None:
        """End this actor because its owner is gone; it has no one to report to. From any thread."""
        self.owner = None
        self.fail(FailureKind.OWNED, f"{self.label}: {reason}")

    def fail_by_itself(
        self, kind: FailureKind, message: str, cause: MeshFailure | None, error: BaseException | None = None
    ) -> None:
        """Fail because of something that it has done itself, unless it has ended. From any thread."""
        if self._host.actors.get(self.uid) is not None:
            self.fail(kind, f"{self.label}: {message}", cause=cause, error=error)

    def abort(self, reason: str) -> None:
        """End this actor with a failure, at its own request."""
        self.fail(FailureKind.ABORT, f"{self.label} aborted: {reason}")

    def stop_itself(self) -> Future[None]:
        """Stop cleanly; from any thread."""
        self._host.actors.stop(self.uid, self._host.state.settings.stop_timeout_s)
        return self.ended

    async def wind_up(self, *, is_async: bool) -> None:
        """Do what follows the last message: stop owned meshes, then run ``__cleanup__``."""
        self.winds_up.set_result(None)
        reason = self.end_reason()
        self._answer_unfinished()
        for port in list(self._unanswered):  # the oldest first
            refuse_for(port, reason, self.failure)
        outcome: Exception | None = None
        if self._cut_at and self.failure is None:
            outcome = StopTimeoutError(f"{self.label} was stopped and did not finish in time: {self._cut_at}")
        self.progress.begin("the stop of what it owns")
        late = await self._stop_owned(is_async=is_async)
        outcome = outcome or late
        error: Exception | None = SupervisionError(reason, self.failure) if self.failure else None
        self.progress.begin("__cleanup__")
        try:
            await self._clean_up(error, is_async=is_async)
        except BaseException as raised:  # noqa: BLE001  (goes to whoever asked for the stop)
            if forked.original:
                forked.leave(raised)
            if self._is_unwound_by(raised):
                message = f"{self.label} was stopped and did not clean up in time: {self._cut_at}"
                _log.warning("%s", message)
                outcome = outcome or StopTimeoutError(message, self.failure)
            else:
                _log.error("%s: __cleanup__ raised\n%s", self.label, describe(raised))
                outcome = SupervisionError(f"{self.label}: __cleanup__ raised {summarize(raised)}", self.failure)
        self._actor = None  # which frees what it holds
        self.bury(outcome)

    async def _clean_up(self, error: Exception | None, *, is_async: bool) -> None:
        if self._actor is not None:
            cleaned = self._actor.__cleanup__(error)
            if is_async and asyncio.iscoroutine(cleaned):
                await cleaned
            if forked.original:
                forked.leave()

    def is_cleanup_cut(self) -> bool:
        """Whether the time for its cleanup is up, too."""
        return self.bound is not None and self.bound.stage is Stage.CLEANUP_CUT

    def _is_unwound_by(self, error: BaseException) -> bool:
        return self.is_cleanup_cut() and isinstance(error, ActorEndedError | asyncio.CancelledError)

    def bury(self, outcome: Exception | None = None) -> None:
        """Leave a tombstone, and tell the callers that wait for the end."""
        self._host.actors.forget(self)
        self._host.stops.constructed(self)
        for number in list(self.meshes.notices.values()):
            self._host.ports.close(number)
        self.over.settle_by(lambda: self.failure)
        self.ended.settle_by(raising(outcome) if outcome else lambda: None)

    def give_up(self) -> None:
        """Bury it although its thread is still busy. On the loop thread."""
        assert self.bound is not None  # it has just passed
        took_s = _now() - self.bound.began_s
        message = (
            f"{self.label} did not end within the {took_s:.3g} s that it had: {self._doing()}; "
            "it was given up, and its thread runs until its process ends"
        )
        _log.warning("%s\n%s", message, self._stack().rstrip())
        self.cut_off()
        self.bury(StopTimeoutError(message, self.failure))
        for mesh in reversed(self.meshes.all()):
            with contextlib.suppress(ControlError):
                mesh.stop()

    # What it is doing, for messages

    def _doing(self) -> str:
        what = ", ".join(f"{name} has been running for {for_s:.1f} s" for name, for_s in self.progress.doing())
        return (what or "it has just finished with a message") + self._where()

    def _where(self) -> str:
        """The line of user code that it is at."""
        stack = self.executor.stack()
        if not stack:
            return ""
        at = next((frame for frame in reversed(stack) if is_of_users(frame)), stack[-1])
        return f", at {at.filename}:{at.lineno} in {at.name}: {at.line}"

    def _stack(self) -> str:
        return "".join(traceback.format_list(self.executor.stack()))

    async def _stop_owned(self, *, is_async: bool) -> StopTimeoutError | None:
        """Stop what it owns, the youngest first, and leave time for its own cleanup.

        Returns:
            The error of a mesh that was cut short, or has not answered in time; None if all have ended in time.
        """
        assert self.bound is not None  # it ends
        until_s = _now() + OWNED * self.bound.left_s()
        meshes = self.meshes.all()
        ends: list[tuple[OwnedMesh, Future[None]]] = []
        late: StopTimeoutError | None = None
        try:
            while meshes:
                mesh, left_s = meshes.pop(), max(until_s - _now(), 0.0)
                # A mesh that does not end must not use up the time of the others.
                with contextlib.suppress(ControlError, TimeoutError):
                    ends.append((mesh, mesh.stop(left_s)))
                    await _wait(ends[-1][1], left_s / (len(meshes) + 1), is_async=is_async)
            for mesh, end in ends:
                try:
                    await _wait(end, until_s - _now(), is_async=is_async)
                except (ControlError, TimeoutError) as error:
                    why = str(error) or "it did not confirm in time that it has ended"  # asyncio says nothing
                    _log.warning("%s: %s did not stop cleanly: %s", self.label, mesh.name, why)
                    late = late or self._lateness(mesh, error)
        except (ActorEndedError, asyncio.CancelledError):
            for mesh in meshes:
                mesh.stop()
        return late

    def _lateness(self, mesh: OwnedMesh, error: Exception) -> StopTimeoutError | None:
        """The error of the stop of an owned mesh, if that took too long; else None."""
        if isinstance(error, StopTimeoutError):
            return error
        if not isinstance(error, TimeoutError):
            return None
        return StopTimeoutError(
            f"{self.label} was stopped, and {mesh.name}, which it owns, did not confirm in time that it has ended"
        )


async def _wait(end: Future[None], seconds: float, *, is_async: bool) -> None:
    if end.done() or not is_async:
        end.get(max(seconds, 0.0))
    else:
        async with asyncio.timeout(max(seconds, 0.0)):
            await end


CALLERS_OF_USERS = frozenset(
    function.__code__
    for function in (ActorState.construct, ActorState._answer, ActorState._clean_up, ActorState.supervise)
)
"""The functions that call code of users on the thread of an actor."""


def _consequence(error: BaseException, port: Port[Any] | None, *, wants_reply: bool) -> str:
    """Why an exception of an endpoint ends the actor; empty if it is only an answer to the caller.

    A cancelled endpoint does not end the actor: something that it awaits was cancelled, and the caller gets that error.
    """
    if not isinstance(error, Exception | asyncio.CancelledError):
        return "which is not an Exception and ends its actor"
    if not wants_reply:
        return "and nobody waited for its reply"
    return "" if port is None else "before or after it has answered through its port"
