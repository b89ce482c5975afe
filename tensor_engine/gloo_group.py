"""`make_gloo`: gloo among the members of a group, each of whom is known by the job's links before a byte goes to it."""

from __future__ import annotations

import datetime
import queue
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from control import Future
from control.gathering import Part
from dataplane.backends.own_sockets import Place
from tensor_engine.errors import CommunicationError, CommunicationTimeoutError
from tensor_engine.gloo_port import GlooPort
from tensor_engine.rendezvous import JobStore, MeetingPoint, answer

_THREADS = 2  # one for what comes while another is at work: all that a stream ever has under way
_LOOK_S = 0.001
"""How long to wait before another look at this process's sockets: a connection within a host takes less."""
_MOST_LOOKS_S = 0.05


def make_gloo(point: MeetingPoint, name: str, rank: int, size: int) -> Any:
    """Gloo's backend for a group. All members call it, and it returns once they are connected.

    Args:
        point: where they find each other.
        name: of the group.
        rank: of this member.
        size: how many there are.

    Raises:
        CommunicationTimeoutError: others did not come in time; the message names them.
        CommunicationError: one of them is gone, or has failed.
    """
    port = GlooPort.open()
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = datetime.timedelta(seconds=point.timeout_s)
    options._threads = _THREADS
    options._devices = [port.device]
    try:
        if size == 1:
            return dist.ProcessGroupGloo(HashStore(), 0, 1, options)
        mine = (secrets.token_hex(8), port.place.pack())
        here = point.gather(f"{name}/here", {rank: mine}, range(size))
        meeting, _ = here[0]
        places = {Place.parse(place): member for member, (_, place) in here.items() if member != rank}
        store = JobStore(point, f"{name}/{meeting}", is_written_once=True)
        port.let_in()
        with _Admission(point, f"{name}/{meeting}", port, places, rank) as admission:
            backend = _connect(lambda: dist.ProcessGroupGloo(store, rank, size, options), admission)
        store.forget(size)
        return backend
    finally:
        port.close()


def _connect(make: Callable[[], Any], admission: _Admission) -> Any:
    """Run gloo's constructor in a thread: where a member fails meanwhile it may wait for ever, and is left there.

    Raises:
        CommunicationError: the group has failed.
    """
    ended: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            ended.put((make(), None))
        except Exception as error:  # noqa: BLE001  (raised by the caller)
            ended.put((None, error))
            admission.give_up()

    threading.Thread(target=run, name="gloo-connect", daemon=True).start()
    admission.wait()
    try:
        backend, error = ended.get(timeout=admission.point.timeout_s)
    except queue.Empty:
        raise CommunicationTimeoutError(
            f"the group was not made within {admission.point.timeout_s:g} s of its members' coming"
        ) from None
    if error is not None:
        raise error
    return backend


class _Pair:
    """This member and another one, of whom one connects to the other; gloo decides which.

    They meet twice by the job's links: to say from which port who has connected, and that data is taken on it.

    Args:
        admission: of this member.
        member: the other one.
    """

    def __init__(self, admission: _Admission, member: int) -> None:
        self.is_over = False
        self._admission = admission
        self._member = member
        self._pair = min(admission.rank, member), max(admission.rank, member)
        self._said: Future[Any] | None = None
        self._taken: Future[Any] | None = None
        self._connected = self._meet("connected", {admission.rank: None})

    def advance(self, outgoing: dict[int, int]) -> bool:
        """Do what can be done by now.

        Args:
            outgoing: to whom this member has connected, and from which of its ports.

        Returns:
            Whether something was done.

        Raises:
            CommunicationError: the other one cannot be met.
        """
        admission = self._admission
        if self._said is None and self._member in outgoing:
            told = admission.rank, outgoing[self._member]
            self._said = self._meet("connected", {self._pair: told})
            return True
        if not self._connected.done():
            return False
        who, port = answer(self._connected, 0)[self._pair]
        if self._taken is None:
            if who != admission.rank and not admission.port.take(port):
                return False  # gloo has not accepted it yet
            self._taken = self._meet("taken", {admission.rank: None})
            self.is_over = who != admission.rank
            return True
        if not self._taken.done():
            return False
        answer(self._taken, 0)
        admission.port.kick(port)
        self.is_over = True
        return True

    def _meet(self, what: str, brought: dict[Part, Any]) -> Future[Any]:
        low, high = self._pair
        expected: tuple[Part, ...] = (low, high, self._pair) if what == "connected" else self._pair
        return self._admission.point.begin_gathering(f"{self._admission.name}/{low}-{high}/{what}", brought, expected)


class _Admission:
    """Lets the other members in while gloo waits for them: a thread, since gloo keeps the one that it is called by.

    gloo connects to one member after the other, so they are let in one by one.

    Attributes:
        failure: why the group has failed.

    Args:
        point: where members meet.
        name: of what they are making.
        port: of this member.
        places: where the others listen.
        rank: of this member.
    """

    def __init__(self, point: MeetingPoint, name: str, port: GlooPort, places: dict[Place, int], rank: int) -> None:
        self.failure: CommunicationError | None = None
        self.point = point
        self.name = name
        self.port = port
        self.rank = rank
        self._places = places
        self._is_given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gloo-admission", daemon=True)

    def wait(self) -> None:
        """Until all are connected.

        Raises:
            CommunicationError: they are not.
        """
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def give_up(self) -> None:
        """Let nobody in any more."""
        self._is_given_up.set()

    def __enter__(self) -> _Admission:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.give_up()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._let_in()
        except CommunicationError as error:
            self.failure = error
        except OSError as error:
            self.failure = CommunicationError(f"the connections of the group cannot be looked at: {error}")

    def _let_in(self) -> None:
        deadline = time.monotonic() + self.point.timeout_s
        pairs = [_Pair(self, member) for member in self._places.values()]
        pause_s = _LOOK_S
        while pairs:
            outgoing = self.port.outgoing(self._places)
            is_going_on = [pair.advance(outgoing) for pair in pairs]
            pairs = [pair for pair in pairs if not pair.is_over]
            if any(is_going_on):
                pause_s = _LOOK_S
                continue
            if time.monotonic() > deadline:
                raise CommunicationTimeoutError(
                    f"members of the group did not connect within {self.point.timeout_s:g} s"
                )
            if self._is_given_up.wait(pause_s):
                return
            pause_s = min(1.1 * pause_s, _MOST_LOOKS_S)
