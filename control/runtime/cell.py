"""`Cell`: one actor of this process, from its construction to its end, whatever kind of thread runs it."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections import deque
from time import monotonic as _now
from typing import TYPE_CHECKING, Any

from control import forked, tracing
from control.actor import Actor, ActorInterface, interface_of
from control.context import ActorInstance, Context, current_context
from control.errors import ActorError, ControlError, SupervisionError
from control.exception_text import describe, summarize
from control.failure import FailureKind, MeshFailure
from control.future import Future
from control.marking import WRAPPED
from control.port import Port, ReplyAddress
from control.runtime.messages import ActorRef, Mail, OwnerRef, SpawnRequest
from control.runtime.replies import first_exception, pack_exception, refuse
from control.shape import Point
from control.wire.envelope import Kind, Payload
from control.wire.payload import pack, unpack

if TYPE_CHECKING:
    from control.runtime.begins import BeginLog
    from control.runtime.executor import Executor
    from control.runtime.history import Event
    from control.runtime.process import Process
    from control.runtime.supervision import OwnedMesh

_log = logging.getLogger("control")

_unpacking = threading.Lock()
"""Held while a class is unpacked, which imports what it needs. Imports of two threads that need each other's modules,
begun in different places, can end in an error of Python's import system where the modules import in a circle."""

_ARGUMENTS = "the arguments"
_RESULT = "the result"


class CellEndedError(BaseException):
    """Unwinds the endpoint of a sync actor that failed while it was waiting. Never leaves the runtime."""


class Cell:
    """One actor of this process.

    The coroutines of this class run on the actor's own thread: an async actor's event loop runs them, a sync actor's
    thread drives them through, since nothing in them waits then.
    """

    def __init__(
        self, process: Process, request: SpawnRequest, rank: int, body: Payload, *, asked_for: bool = False
    ) -> None:
        self.process = process
        self.uid = request.uid
        self.name = request.name
        self.rank = Point(rank, request.extent)
        self.owner: OwnerRef | None = request.owner
        self.ref = ActorRef(process.me, request.uid, request.name, self.rank)
        self.actor_id = self.ref.actor_id
        self.owned: dict[int, OwnedMesh] = {}
        self.spawned: set[int] = set()
        """Numbers of all meshes that it has ever owned."""
        self.notices: dict[int, int] = {}
        """Where it is told of broadcasts that were not delivered, by the number of the mesh."""
        self.failure: MeshFailure | None = None
        self.ready: Future[None] = Future()
        """Ends when ``__init__`` has returned; in an error if it raised."""
        self.ended: Future[None] = Future()
        """Ends when the actor is gone and everything that it owned is, too."""
        self.over: Future[MeshFailure | None] = Future()
        """Ends when the actor has failed, in that failure; or when it has been stopped and is gone, in None."""
        self.is_winding_up = False
        """Whether its last message is behind it and its cleanup has begun."""
        self.executor: Executor | None = None
        self.begins: BeginLog | None = None
        """Where it writes down what it begins to handle, if somebody wants to know that after its death."""
        self.instance = ActorInstance(self, request.creator)
        self.context = Context(self.instance, rank, request.extent)
        """What `context` returns where no message is being handled."""
        self.failures: deque[MeshFailure] = deque()
        self._body: Payload = body
        self._asked_for = asked_for
        self._actor: Actor | None = None
        self._interface: ActorInterface | None = None
        self._current: Mail | None = None
        self._begun_s = 0.0
        self._born_s = _now()
        self._beside: list[tuple[Mail, float]] = []
        """What concurrent endpoints are handling, beside the current message, and since when."""
        self.handled = 0
        """How many messages it has handled, with whatever outcome."""
        self.errors = 0
        """How many of them ended in an exception."""
        self.last_error: Event | None = None
        self._unanswered: weakref.WeakSet[Port[Any]] = weakref.WeakSet()

    def deliver(self, mail: Mail) -> None:
        """Queue a message; from any thread."""
        assert self.executor is not None  # cells enter the table with their executor
        self.executor.submit(mail)

    def answer_dead(self, mail: Mail) -> None:
        """Tell the sender of a message that it came too late."""
        refuse(self.process, mail, self.end_reason(), self.failure)

    def _answer_unfinished(self) -> None:
        """Tell those who wait for messages that were delivered and will not be finished."""
        for mail in (self._current, *(mail for mail, _ in self._beside)):
            if mail is not None:
                refuse(self.process, mail, self.end_reason(), self.failure, delivered=True)

    def has_failed(self) -> bool:
        """Whether the actor has ended in a failure; another thread may bring that about at any moment."""
        return self.failure is not None

    def end_reason(self) -> str:
        """Why this actor answers no more."""
        if self.failure is not None:
            return f"actor {self.ref} has failed: {self.failure.headline()}"
        return f"actor {self.ref} has been stopped"

    async def construct(self, *, is_async: bool) -> None:
        """Make the actor object."""
        body, self._body = self._body, ()
        try:
            with _unpacking:
                cls, args, kwargs = unpack(body, "the class and the arguments of this actor")
            self._interface = interface_of(cls)
            # In two steps, so that there is somebody to supervise while ``__init__`` waits for what it has spawned.
            self._actor = cls.__new__(cls, *args, **kwargs)
            self._actor.__init__(*args, **kwargs)  # type: ignore[misc]
            if forked.original:
                forked.leave()
        except CellEndedError:
            self._actor = None  # it failed for another reason while it waited in __init__
        except BaseException as error:  # noqa: BLE001  (whatever a constructor raises is the actor's failure)
            if forked.original:
                forked.leave(error)
            self._actor = None  # half made: there is nothing to clean up
            summary, trace = summarize(error), describe(error)
            self._note_error("__init__", error)
            if self._asked_for:
                self.owner = None  # somebody waits for `ready`, so it is their error and not the owner's
            self.fail(FailureKind.CONSTRUCTION, f"{self.label}: __init__ raised {summary}", trace, error=error)
            self.ready._settle(_raiser(ActorError(self.actor_id, "__init__", summary, trace, error)))
        if self.failure is None:
            self.ready._settle(lambda: None)
        else:
            self.ready._settle(_raiser(SupervisionError(self.end_reason(), self.failure)))

    def never_begin(self, reason: str) -> None:
        """End an actor that has no thread; from any thread."""
        if self._asked_for:
            self.owner = None  # somebody waits for `ready`
        self.fail(FailureKind.ABORT, f"{self.label} could not be constructed: {reason}")
        self.ready._settle(_raiser(SupervisionError(self.end_reason(), self.failure)))
        self.bury()

    @property
    def label(self) -> str:
        """The actor as error messages name it."""
        return f"actor {self.name}{self.rank!r} in {self.process.me.name}"

    def is_concurrent(self, mail: Mail) -> bool:
        """Whether messages behind this one need not wait for it."""
        assert self._interface is not None  # messages are handled once the actor is constructed
        spec = self._interface.endpoints.get(mail.envelope.method.removesuffix(WRAPPED))
        return spec is not None and spec.concurrent

    async def handle_beside(self, mail: Mail) -> None:
        """Run one concurrent endpoint."""
        if self.has_failed():
            self.answer_dead(mail)
            return
        entry = (mail, _now())
        self._beside.append(entry)
        try:
            if tracing.tracer is None:
                await self._answer(mail)
            else:
                with tracing.tracer.serving(self, mail):
                    await self._answer(mail)
        finally:
            self._beside.remove(entry)

    async def handle(self, mail: Mail) -> None:
        """Run one endpoint."""
        if self.has_failed():
            self.answer_dead(mail)
            return
        self._begun_s = _now()
        self._current = mail
        if tracing.tracer is None:
            await self._answer(mail)
        else:
            with tracing.tracer.serving(self, mail):
                await self._answer(mail)
        if not self.has_failed():
            self._current = None

    async def _answer(self, mail: Mail) -> None:
        envelope = mail.envelope
        assert self._interface is not None  # messages are handled once the actor is constructed
        assert self._actor is not None
        if self.begins is not None:
            self.begins.take(mail)
        current_context.set(Context(self.instance, envelope.rank, envelope.extent))
        port: Port[Any] | None = None
        has_begun = False
        try:
            spec = self._interface.find(envelope.method)
            if spec.is_wrapped:
                with _unpacking:  # it brings code
                    args, kwargs = unpack(envelope.payload, _ARGUMENTS)
            else:
                args, kwargs = unpack(envelope.payload, _ARGUMENTS)
            method = getattr(self._actor, spec.name)
            has_begun = True
            if self.begins is not None:
                self.begins.begin()
            if spec.explicit_response_port:
                number = envelope.reply_to if envelope.wants_reply else 0
                port = Port(ReplyAddress(mail.sender, number, envelope.rank), True, owed=bool(number))
                self._unanswered.add(port)
                result = method(port, *args, **kwargs)
            elif spec.is_wrapped:
                result = args[0](method, *args[1:], **kwargs)
            else:
                result = method(*args, **kwargs)
            if spec.is_async:
                result = await result
            if forked.original:
                forked.leave()
            if envelope.wants_reply and port is None:
                self.process.reply(mail, Kind.REPLY, pack(result, lend=True, name=_RESULT))
        except CellEndedError:
            return
        except BaseException as error:  # noqa: BLE001  (whatever an endpoint raises is its caller's, or its actor's end)
            if forked.original:
                forked.leave(error)
            if self.has_failed():
                return
            self._note_error(envelope.method, error)
            consequence = _consequence(error, port, wants_reply=envelope.wants_reply)
            if (consequence and has_begun) or not envelope.reply_to:
                message = f"{self.label}: {envelope.method} raised {summarize(error)}, {consequence}"
                self.fail(FailureKind.EXCEPTION, message, describe(error), error=error)
            else:
                packed = pack_exception(error, actor_id=self.actor_id, endpoint=envelope.method)
                self.process.reply(mail, Kind.ERROR, packed)
        self.handled += 1
        if not self.has_failed():  # else it has been refused, which counts it too
            self.process.flow.handled(mail)

    def handling(self) -> list[tuple[str, float]]:
        """The endpoints that it runs, each with the seconds since it was begun; from any thread."""
        begun = [] if (current := self._current) is None else [(current, self._begun_s)]
        return [(mail.envelope.method.removesuffix(WRAPPED), _now() - since) for mail, since in (*begun, *self._beside)]

    def age_s(self) -> float:
        """Seconds since it was spawned."""
        return _now() - self._born_s

    @property
    def class_name(self) -> str:
        """Of the actor; empty where it is not constructed yet."""
        return self._interface.class_name if self._interface is not None else ""

    def _note_error(self, method: str, error: BaseException) -> None:
        self.errors += 1
        if tracing.tracer is not None:
            tracing.tracer.failed(error)
        self.last_error = self.process.history.failed(f"{self.ref}.{method.removesuffix(WRAPPED)}", summarize(error))

    async def supervise(self, *, is_async: bool) -> None:
        """Attend to the failures of owned meshes."""
        while self.failures and self.failure is None:
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
                if self.failure is None:
                    message = f"{self.label}: __supervise__ raised {summarize(error)}"
                    self.fail(FailureKind.EXCEPTION, message, describe(error), cause=failure, error=error)
                return
            if handled:
                self.process.owners.handled(failure)
            else:
                self.fail(
                    FailureKind.OWNED, f"{self.label} did not handle a failure of {failure.mesh_name!r}", cause=failure
                )

    def own(self, mesh: OwnedMesh) -> None:
        """Take a mesh that this actor has just spawned."""
        self.owned[mesh.uid] = mesh
        self.spawned.add(mesh.uid)

    def owned_failed(self, failure: MeshFailure) -> None:
        """Take note of the failure of an owned mesh; from any thread."""
        self.failures.append(failure)
        assert self.executor is not None  # cells own nothing before they run
        self.executor.interrupt()

    def fail(
        self,
        kind: FailureKind,
        message: str,
        details: str = "",
        cause: MeshFailure | None = None,
        error: BaseException | None = None,
    ) -> None:
        """End this actor in a failure, which goes to its owner; from any thread."""
        exception = "" if error is None else first_exception(error)
        failure = MeshFailure(self.name, self.actor_id, self.rank, kind, message, details, cause, exception=exception)
        if not self.process.cells.end(self, failure):
            return
        self.process.owners.report(self.owner, failure)
        self.over._settle(lambda: failure)
        assert self.executor is not None  # cells fail once they run
        # The thread may be busy for long: those who wait are answered from here.
        self._answer_unfinished()
        self.executor.drain()
        self.executor.interrupt()

    def orphan(self, reason: str) -> None:
        """End this actor because its owner is gone; there is nobody to report to. From any thread."""
        self.owner = None
        self.fail(FailureKind.OWNED, f"{self.label}: {reason}")

    def fail_by_itself(
        self, kind: FailureKind, message: str, cause: MeshFailure | None, error: BaseException | None = None
    ) -> None:
        """Fail for something that it has done itself; void where it has ended. From any thread."""
        if self.process.cells.get(self.uid) is not None:
            self.fail(kind, f"{self.label}: {message}", cause=cause, error=error)

    def abort(self, reason: str) -> None:
        """End this actor in a failure of its own choice."""
        self.fail(FailureKind.ABORT, f"{self.label} aborted: {reason}")

    def stop_itself(self) -> Future[None]:
        """Stop in good order; from any thread."""
        self.process.cells.stop(self.uid)
        return self.ended

    async def wind_up(self, *, is_async: bool) -> None:
        """Everything after the last message: owned meshes first, then ``__cleanup__``."""
        self.is_winding_up = True
        reason = self.end_reason()
        self._answer_unfinished()
        for port in list(self._unanswered):
            port._refuse(reason, self.failure)
        await self._stop_owned(is_async=is_async)
        error: Exception | None = SupervisionError(reason, self.failure) if self.failure else None
        outcome: Exception | None = None
        if self._actor is not None:
            try:
                cleaned = self._actor.__cleanup__(error)
                if is_async and asyncio.iscoroutine(cleaned):
                    await cleaned
                if forked.original:
                    forked.leave()
            except BaseException as raised:  # noqa: BLE001  (goes to whoever asked for the stop)
                if forked.original:
                    forked.leave(raised)
                _log.error("%s: __cleanup__ raised\n%s", self.label, describe(raised))
                outcome = SupervisionError(f"{self.label}: __cleanup__ raised {summarize(raised)}", self.failure)
        self.bury(outcome)

    def bury(self, outcome: Exception | None = None) -> None:
        """Leave a tombstone, and tell those who wait for the end."""
        self.process.cells.forget(self)
        for number in self.notices.values():
            self.process.ports.close(number)
        self.over._settle(lambda: self.failure)
        self.ended._settle(_raiser(outcome) if outcome else (lambda: None))

    async def _stop_owned(self, *, is_async: bool) -> None:
        for mesh in reversed(list(self.owned.values())):
            try:
                future = mesh.stop()
                if is_async:
                    async with asyncio.timeout(self.process.settings.stop_timeout_s):
                        await future
                else:
                    future.get(self.process.settings.stop_timeout_s)
            except (ControlError, TimeoutError) as error:
                _log.warning("%s: %s did not stop in good order: %s", self.label, mesh.name, error)


def _consequence(error: BaseException, port: Port[Any] | None, *, wants_reply: bool) -> str:
    """Why an actor ends with what its endpoint raised; empty where that is an answer to the caller and no more.

    A cancelled endpoint is no reason to end: something that it awaits was cancelled, which is its caller's error.
    """
    if not isinstance(error, Exception | asyncio.CancelledError):
        return "which is no Exception and ends its actor"
    if not wants_reply:
        return "and nobody waited for its reply"
    return "" if port is None else "before or after it has answered through its port"


def _raiser(error: Exception) -> Any:
    def raise_it() -> None:
        raise error

    return raise_it
