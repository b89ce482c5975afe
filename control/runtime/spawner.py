"""`Spawner`: makes the actors that others request in this process."""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING

from skipper.control.model.actor import ActorInterface
from skipper.control.model.errors import ActorDefinitionError, ThreadLimitError
from skipper.control.model.future import Future, Promise, peek
from skipper.control.runtime.actor_state import ActorHost, ActorState
from skipper.control.runtime.actor_table import ActorTable
from skipper.control.runtime.messages import Mail, SpawnRequest
from skipper.control.runtime.procs import output_capture
from skipper.control.runtime.requests import CONTROLLER, SPAWN
from skipper.control.wire.messages import Payload

if TYPE_CHECKING:
    from skipper.control.runtime.executor import ExecutorChoice
    from skipper.control.runtime.flow_control import Flow
    from skipper.control.runtime.history import FaultHistory
    from skipper.control.runtime.messenger import Messenger
    from skipper.control.runtime.ownership import Ownership
    from skipper.control.runtime.process_state import ProcessState
    from skipper.control.runtime.request_server import RequestServer


class Spawner:
    """Makes actors, and the controllers that a job has only once."""

    def __init__(
        self,
        state: ProcessState,
        actors: ActorTable,
        flow: Flow,
        messenger: Messenger,
        owners: Ownership,
        history: FaultHistory,
        requests: RequestServer,
        *,
        executor_for: ExecutorChoice,
    ) -> None:
        self._actors = actors
        self._owners = owners
        self._executor_for = executor_for
        self._host = ActorHost(state, actors, actors.stops, flow, messenger, owners, history, messenger.ports)
        self._controllers_lock = threading.Lock()
        self._controllers: dict[str, tuple[SpawnRequest, ActorInterface, ActorState]] = {}
        requests.serve(SPAWN, self._spawn)
        requests.serve(CONTROLLER, self._controller)

    def _start(
        self, request: SpawnRequest, rank: int, body: Payload, *, is_async: bool, asked_for: bool = False
    ) -> ActorState:
        new_executor = self._executor_for(is_async=is_async)
        actor = ActorState(self._host, request, rank, body, new_executor, asked_for=asked_for)
        output_capture.note_actor(request.name)
        self._actors.add(actor)
        try:
            actor.executor.start()
        except (ThreadLimitError, ActorDefinitionError) as error:
            actor.never_begin(str(error))
        return actor

    def _spawn(self, mail: Mail, argument: tuple[tuple[SpawnRequest, bool], Payload]) -> None:
        (request, is_async), body = argument
        self._start(request, mail.message.rank, body, is_async=is_async)

    def _controller(
        self, mail: Mail, argument: tuple[tuple[str, SpawnRequest, ActorInterface], Payload]
    ) -> Future[tuple[SpawnRequest, ActorInterface]]:
        (name, request, interface), body = argument
        with self._controllers_lock:  # several may ask at once, each on a thread of its own
            known = self._controllers.get(name)
            if known is None or known[2].failure is not None:
                root = self._owners.root
                assert root is not None  # requests for controllers go to the script
                request = dataclasses.replace(request, creator=root.instance.as_creator())
                actor = self._start(request, 0, body, is_async=interface.is_async, asked_for=True)
                known = self._controllers[name] = (request, interface, actor)
        request, interface, actor = known
        answer: Promise[tuple[SpawnRequest, ActorInterface]] = Promise()
        actor.ready.add_done_callback(lambda ready: answer.settle_by(lambda: (peek(ready), (request, interface))[1]))
        return answer
