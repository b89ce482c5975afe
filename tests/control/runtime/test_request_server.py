"""Requests, without a second process: what is packed is unpacked, and what a handler returns is the answer."""

from typing import Any

import pytest

from skipper.control import ActorError, SupervisionError
from skipper.control.model.future import Future, Promise
from skipper.control.model.settings import Settings
from skipper.control.runtime.messages import Mail
from skipper.control.runtime.process_state import ProcessState
from skipper.control.runtime.replies import open_reply
from skipper.control.runtime.request_server import RequestServer
from skipper.control.runtime.requests import PING, STOP_ACTOR, Request, RequestWithBody
from skipper.control.wire.messages import Call, Kind, Payload, ProcessRequest
from skipper.control.wire.process_ref import ProcessRef

ME = ProcessRef("job-1", "unix-abstract:job-1", "me")
ASKER = ProcessRef("job-2", "unix-abstract:job-2", "asker")


class Answers:
    """Stands for the messenger: keeps what is answered."""

    def __init__(self) -> None:
        self.given: list[tuple[ProcessRef, Kind, Any]] = []

    def reply(self, mail: Mail, kind: Kind, payload: Payload) -> None:
        raise AssertionError("a request is no message for an actor")

    def reply_to(self, sender: ProcessRef, message: Call | ProcessRequest, kind: Kind, payload: Payload) -> None:
        self.given.append((sender, kind, payload))


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def server(answers: Answers) -> RequestServer:
    return RequestServer(ProcessState(ME, ME, b"", Settings(), None, True, 1), answers)


def test_an_argument_arrives_as_it_was_given_and_none_takes_no_bytes() -> None:
    assert STOP_ACTOR.unpack(STOP_ACTOR.pack(2.5)) == 2.5
    assert PING.pack(None) == ()
    assert PING.unpack(()) is None


def test_a_body_is_passed_on_as_it_is() -> None:
    request: RequestWithBody[str, None] = RequestWithBody("made up")
    body = (b"packed", b"already")
    assert request.unpack(request.pack(("head", body))) == ("head", body)


def test_a_request_is_answered_once_its_future_ends(server: RequestServer, answers: Answers) -> None:
    asked: list[tuple[int, float]] = []
    promise: Promise[None] = Promise()

    def stop(mail: Mail, timeout: float) -> Future[None]:
        asked.append((mail.message.target, timeout))
        return promise

    server.serve(STOP_ACTOR, stop)
    server.handle(ASKER, STOP_ACTOR.message(2.5, target=7, port=3))
    assert (asked, answers.given) == ([(7, 2.5)], [])
    promise.set_result(None)
    ((sender, kind, payload),) = answers.given
    assert (sender, kind, open_reply(kind, payload)) == (ASKER, Kind.REPLY, None)


def test_an_error_of_the_runtime_is_the_same_error_for_whoever_asks(server: RequestServer, answers: Answers) -> None:
    promise: Promise[None] = Promise()
    promise.set_exception(SupervisionError("it is gone"))
    server.serve(PING, lambda mail, _: promise)
    server.handle(ASKER, PING.message(None, port=3))
    ((_, kind, payload),) = answers.given
    with pytest.raises(SupervisionError, match="it is gone"):
        open_reply(kind, payload)


@pytest.mark.parametrize("request_", [PING, Request("unheard of")])
def test_a_request_that_cannot_be_served_costs_its_asker_alone(
    request_: Request[Any, Any], server: RequestServer, answers: Answers
) -> None:
    def fail(mail: Mail, _: None) -> None:
        raise ValueError("cannot be done")

    server.serve(PING, fail)
    server.handle(ASKER, request_.message(None, port=3))
    ((_, kind, payload),) = answers.given
    with pytest.raises(ActorError):
        open_reply(kind, payload)


def test_a_handler_without_a_future_gives_no_answer(server: RequestServer, answers: Answers) -> None:
    server.serve(PING, lambda mail, _: None)
    server.handle(ASKER, PING.message(None))
    assert answers.given == []
