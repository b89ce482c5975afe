"""`RequestServer`: what processes ask of each other besides calls to actors.

Handlers run on the thread that brought the request, and must not block.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skipper.control.model.actor import ActorInterface
from skipper.control.model.errors import ControlError, ThreadLimitError
from skipper.control.model.failure import MeshFailure
from skipper.control.model.future import Future
from skipper.control.runtime.actor_state import ActorState
from skipper.control.runtime.begin_log import BeginLog
from skipper.control.runtime.executor import AsyncExecutor, SyncExecutor
from skipper.control.runtime.inquiry import activity
from skipper.control.runtime.messages import Mail, OwnerRef, SpawnRequest
from skipper.control.runtime.replies import pack_error, pack_exception
from skipper.control.runtime.supervision import ROOT_UID
from skipper.control.wire.envelope import Envelope, Kind, Payload, ProcessRef
from skipper.control.wire.payload import pack, unpack

if TYPE_CHECKING:
    from skipper.control.runtime.process import Process


_log = logging.getLogger("skipper.control")


class RequestServer:
    """Answers the requests of other processes, and of this one."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._handlers: dict[str, Callable[[ProcessRef, Envelope], None]] = {
            "spawn": self._spawn,
            "stop_actor": self._stop_actor,
            "stop_mesh": self._stop_mesh,
            "failure": self._failure,
            "handled": self._handled,
            "exit": self._exit,
            "ping": self._ping,
            "obituary": self._obituary,
            "activity": self._activity,
            "ready": self._ready,
            "begins": self._begins,
            "watch": self._watch,
            "link": self._link,
            "controller": self._controller,
            "join": self._join,
            "launch": self._launch,
            "stop_launched": self._stop_launched,
            "kill_launched": self._kill_launched,
            "address": self._address,
            "survey": self._survey,
            "output": self._output,
            "flush_output": self._flush_output,
            "serve": self._serve,
        }
        self._controllers_lock = threading.Lock()
        self._controllers: dict[str, tuple[SpawnRequest, ActorInterface, ActorState]] = {}

    def handle(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Do what the envelope asks for."""
        try:
            self._handlers[envelope.method](sender, envelope)
        except Exception as error:  # noqa: BLE001  (a request that cannot be served costs its asker, not the link)
            _log.exception("%s: the request %s from %s failed", self._process.me.name, envelope.method, sender.name)
            packed = pack_exception(error, actor_id=self._process.me.name, endpoint=envelope.method)
            self._process.reply_to(sender, envelope, Kind.ERROR, packed)

    def _start(
        self, request: SpawnRequest, rank: int, body: Payload, *, is_async: bool, asked_for: bool = False
    ) -> ActorState:
        actor = ActorState(self._process, request, rank, body, asked_for=asked_for)
        actor.executor = AsyncExecutor(actor) if is_async else SyncExecutor(actor)
        self._process.actors.add(actor)
        try:
            actor.executor.start()
        except ThreadLimitError as error:
            actor.never_begin(str(error))
        return actor

    def _spawn(self, sender: ProcessRef, envelope: Envelope) -> None:
        request, is_async = unpack(envelope.payload[:1])
        self._start(request, envelope.rank, envelope.payload[1:], is_async=is_async)

    def _stop_actor(self, sender: ProcessRef, envelope: Envelope) -> None:
        timeout: float = unpack(envelope.payload)
        self._acknowledge(sender, envelope, self._process.actors.stop(envelope.target, timeout))

    def _stop_mesh(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Stop a mesh of processes that an actor of this process owns."""
        mesh, timeout = self._process.owners.find(envelope.target), unpack(envelope.payload)
        self._acknowledge(sender, envelope, Future.of(None) if mesh is None else mesh.stop(timeout))

    def _failure(self, sender: ProcessRef, envelope: Envelope) -> None:
        owner: OwnerRef
        failure: MeshFailure
        owner, failure = unpack(envelope.payload)
        self._process.owners.take(owner, failure)

    def _handled(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Take note that an actor has handled the death of a process, which the script may own, too."""
        if (root := self._process.root_actor) is not None:
            root.faults.hear(unpack(envelope.payload))

    def _exit(self, sender: ProcessRef, envelope: Envelope) -> None:
        timeout: float = unpack(envelope.payload)
        self._process.ending.exit_in_good_order(lambda: self._acknowledge(sender, envelope, Future.of(None)), timeout)

    def _obituary(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Answer once a child of this process, or a process that has joined, is gone, with the reason."""
        process_id = unpack(envelope.payload)
        child = self._process.children.get(process_id)
        ended = child.ended if child is not None else self._process.members.end_of(process_id)
        ended = ended or self._process.remote_launch.end_of(process_id)
        self._acknowledge(sender, envelope, ended or Future.of("its launcher does not know it"))

    def _join(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Take note of a process that has joined the job."""
        self._process.members.add(sender, unpack(envelope.payload))
        self._acknowledge(sender, envelope, Future.of(None))

    def _survey(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Answer a question that every process of the job is asked, on a thread of its own: that may take long."""

        def work() -> None:
            from skipper.control.observe.job_query import serve

            serve(self._process, sender, envelope)

        threading.Thread(target=work, name="control-survey", daemon=True).start()

    def _output(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Take what processes of another host have written; answer when there is room for more."""
        from skipper.control.observe.log_forwarder import take

        self._acknowledge(sender, envelope, take(sender, envelope.payload))

    def _flush_output(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Answer once the script has what processes of this host have written."""
        from skipper.control.observe.log_forwarder import flush

        self._acknowledge(sender, envelope, flush())

    def _launch(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Start processes on this host for an actor elsewhere."""
        self._process.remote_launch.launch(sender, envelope.target, unpack(envelope.payload))
        self._acknowledge(sender, envelope, Future.of(None))

    def _stop_launched(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Stop what was started here for a mesh; answer once it has ended."""
        self._acknowledge(sender, envelope, self._process.remote_launch.stop(envelope.target, unpack(envelope.payload)))

    def _kill_launched(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Kill what was started here for a mesh."""
        self._process.remote_launch.kill(envelope.target, unpack(envelope.payload))
        self._acknowledge(sender, envelope, Future.of(None))

    def _address(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Answer where a child of this process is reached, once it is there."""
        answer = self._process.remote_launch.address_of(unpack(envelope.payload), sender)
        self._acknowledge(sender, envelope, answer)

    def _serve(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Let tools in, for somebody who is going to need them; under which name is the answer."""
        from skipper.control.observe.debugger import serve_this_job

        name: Future[str] = Future()
        self._acknowledge(sender, envelope, name)
        # It looks at files and knocks at sockets.
        threading.Thread(target=name._settle, args=(serve_this_job,), name="control-serve", daemon=True).start()

    def _ping(self, sender: ProcessRef, envelope: Envelope) -> None:
        self._acknowledge(sender, envelope, Future.of(None))

    def _activity(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Answer what an actor of this process is doing."""
        self._acknowledge(sender, envelope, Future.of(activity(self._process, envelope.target)))

    def _ready(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Answer once the actor has been constructed."""
        actor = self._process.actors.find(envelope.target)
        mail = Mail(sender, envelope)
        if actor is None:
            self._process.actors.answer_for(mail)
            return

        def settled(ready: Future[None]) -> None:
            if actor.has_failed():
                actor.answer_dead(mail)
            else:
                self._acknowledge(sender, envelope, ready)

        actor.ready.add_done_callback(settled)

    def _begins(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Have an actor write down what it begins to handle from now on, and answer where."""
        actor = self._process.actors.find(envelope.target)
        if actor is None:
            self._process.actors.answer_for(Mail(sender, envelope))
            return
        if actor.begins is None:
            actor.begins = BeginLog()
        self._acknowledge(sender, envelope, Future.of(actor.begins.address))

    def _watch(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Answer once an actor has ended, with its failure if it had one."""
        actor = self._process.actors.find(envelope.target)
        if actor is not None:
            self._acknowledge(sender, envelope, actor.over)
        elif envelope.target not in (ROOT_UID, self._process.uid):
            self._process.actors.answer_for(Mail(sender, envelope))
        # The script, and a process as a whole, end with this process: that is the answer.

    def _link(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Change what a port of this process is linked to."""
        add, remove = unpack(envelope.payload)
        self._process.ports.link(self._process, envelope.target, envelope.rank, add, remove)

    def _controller(self, sender: ProcessRef, envelope: Envelope) -> None:
        """Find or make the job's one actor of a name."""
        name, request, interface = unpack(envelope.payload[:1])
        with self._controllers_lock:  # several may ask at once, each on a thread of its own
            known = self._controllers.get(name)
            if known is None or known[2].failure is not None:
                root = self._process.root_actor
                assert root is not None  # it is the script that is asked for controllers
                request = dataclasses.replace(request, creator=root.instance.as_creator())
                actor = self._start(request, 0, envelope.payload[1:], is_async=interface.is_async, asked_for=True)
                known = self._controllers[name] = (request, interface, actor)
        request, interface, actor = known
        answer: Future[Any] = Future()
        actor.ready.add_done_callback(lambda ready: answer._settle(lambda: (ready._peek(), (request, interface))[1]))
        self._acknowledge(sender, envelope, answer)

    def _acknowledge(self, sender: ProcessRef, envelope: Envelope, future: Future[Any]) -> None:
        """Answer a request with the outcome of a future, once it is there."""

        def answer(settled: Future[Any]) -> None:
            try:
                kind, payload = Kind.REPLY, pack(settled._peek())
            except ControlError as error:
                kind = Kind.ERROR
                payload = pack_error(error, actor_id=self._process.me.name, method=envelope.method)
            self._process.reply_to(sender, envelope, kind, payload)

        future.add_done_callback(answer)
