"""Processes that were launched on another host, as their owner's process sees them."""

import asyncio
from types import SimpleNamespace
from typing import Any

from skipper.control.model.future import Future
from skipper.control.runtime.messages import LaunchOrder
from skipper.control.runtime.procs.remote_launch import RemoteLaunch
from skipper.control.runtime.requests import KILL_GIVEN_UP
from skipper.control.wire.process_ref import ProcessRef

HOST = ProcessRef("host", "tcp:10.0.0.1:1", "host")
MEMBER = ProcessRef("member", "", "member", HOST)


class Requests:
    """What is asked of other processes."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any, Any]] = []

    def request(self, to: ProcessRef, request: Any, argument: Any = None, *, target: int = 0) -> Future[Any]:
        self.sent.append((to.id, request, argument))
        return Future.of(None)


def test_a_process_that_has_dialed_its_owner_is_killed_when_the_owner_loses_it() -> None:
    """The link knows what the process has said of itself, and that is not who launched it."""
    requests: Any = Requests()
    nothing: Any = SimpleNamespace(serve=lambda request, handler: None)
    loop = asyncio.new_event_loop()
    launch = RemoteLaunch(nothing, loop, requests, nothing, nothing, nothing, watch=lambda ref: None)
    launch.launch_afar(HOST, 1, LaunchOrder((MEMBER,), {}, (), ()))
    as_dialed = ProcessRef("member", "tcp:10.0.0.1:2", "member")
    launch.give_up(as_dialed, "the connection broke")
    launch.give_up(ProcessRef("stranger", "", "stranger", HOST), "it is not ours")
    loop.close()
    (_, (to, request, (process_id, _))) = requests.sent
    assert (to, request, process_id) == ("host", KILL_GIVEN_UP, "member")
