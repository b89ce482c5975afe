"""`RequestServer`: serves requests of other processes to this one, and of this one to itself.

Each part of the runtime registers the requests that it serves. Handlers run on the thread that brought the request, and
must not block.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from skipper.control.model.errors import ControlError
from skipper.control.model.future import Future, peek
from skipper.control.runtime.interfaces import Replier
from skipper.control.runtime.messages import Mail
from skipper.control.runtime.replies import pack_error, pack_exception
from skipper.control.wire.messages import Kind, ProcessRequest
from skipper.control.wire.payload import pack
from skipper.control.wire.process_ref import ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.process_state import ProcessState
    from skipper.control.runtime.requests import Request

A = TypeVar("A")
R = TypeVar("R")

_log = logging.getLogger("skipper.control")


class RequestServer:
    """The handlers of one process, by the names of the requests."""

    def __init__(self, state: ProcessState, replier: Replier) -> None:
        self._state = state
        self._replier = replier
        self._handlers: dict[str, Callable[[Mail], None]] = {}

    def serve(self, request: Request[A, R], handler: Callable[[Mail, A], Future[R] | None]) -> None:
        """Register the function that serves a request: it gets the request as mail, and its argument.

        It returns a future that ends with the answer; None if no answer is awaited, or another part answers.
        """
        self._handlers[request.name] = functools.partial(self.run, request, handler)

    def serve_by_name(self, name: str, handler: Callable[[Mail], None]) -> None:
        """Register the function for a request that is not declared yet: its module is imported with the first use.

        The function then calls `run`.
        """
        self._handlers[name] = handler

    def handle(self, sender: ProcessRef, request: ProcessRequest) -> None:
        """Run the handler of a request."""
        try:
            self._handlers[request.method](Mail(sender, request))
        except Exception as error:  # noqa: BLE001  (a request that cannot be served costs its asker, not the link)
            me = self._state.me.name
            _log.exception("%s: the request %s from %s failed", me, request.method, sender.name)
            packed = pack_exception(error, actor_id=me, endpoint=request.method)
            self._replier.reply_to(sender, request, Kind.FAILURE, packed)

    def run(self, request: Request[A, R], handler: Callable[[Mail, A], Future[R] | None], mail: Mail) -> None:
        """Serve a request that has come with a handler such as `serve` takes."""
        future = handler(mail, request.unpack(mail.message.payload))
        if future is not None:
            self.answer(mail, future)

    def answer(self, mail: Mail, future: Future[Any]) -> None:
        """Answer a request with the outcome of a future, once that is known."""

        def answer(settled: Future[Any]) -> None:
            try:
                kind, payload = Kind.REPLY, pack(peek(settled))
            except ControlError as error:
                kind = Kind.FAILURE
                payload = pack_error(error, actor_id=self._state.me.name, method=mail.message.method)
            self._replier.reply_to(mail.sender, mail.message, kind, payload)

        future.add_done_callback(answer)
