"""`RequestSequencer`: makes all processes of a replica handle its requests in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skipper.control.api.actor import Actor, concurrent_endpoint
from skipper.control.model.errors import ActorError, ControlError, SupervisionError
from skipper.control.runtime.context import context
from skipper.control.runtime.port import Port, answer_by_error
from skipper.control.runtime.replies import pack_error

if TYPE_CHECKING:
    from skipper.control.api.views import ActorMesh


class RequestSequencer(Actor):
    """Takes the requests to a replica of several processes from all callers, and passes each on to all of its actors.

    Messages of one sender arrive in the same order everywhere; those of several senders may not. Two requests that
    each begin with a collective could then wait for each other for ever. So there is one sender, in the replica's
    first process.
    """

    def __init__(self, actors: ActorMesh[Any]) -> None:
        self._actors = actors
        self._me = context().actor_instance

    @concurrent_endpoint(explicit_response_port=True)
    async def forward(self, port: Port[Any], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call all actors, and answer with their answers."""
        try:
            answers = await getattr(self._actors, method).call(*args, **kwargs)  # sent in order, and then awaited
        except SupervisionError as error:
            self._refuse(port, method, error)
        except ActorError as error:
            # When an actor dies, collectives with it fail in the others; their errors may arrive before its death.
            try:
                await self._actors.initialized
            except SupervisionError as death:
                self._refuse(port, method, death)
            else:
                self._pass_on(port, method, error)
        else:
            port.send(answers)

    def _refuse(self, port: Port[Any], method: str, error: SupervisionError) -> None:
        # Even if the dead actor has certainly not handled it: other actors may have.
        self._pass_on(port, method, SupervisionError(error.message, error.failure))
        # The lost actor may live, and only this one cannot reach it: then only this one knows that the replica fails.
        self._me.abort(f"it has lost an actor of its replica: {error.message}")

    def _pass_on(self, port: Port[Any], method: str, error: ControlError) -> None:
        answer_by_error(port, pack_error(error, actor_id=self._actors.name, method=method))
