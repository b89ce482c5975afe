"""`AgentLink`: a script's, or a tool's, connection with the agent of a host."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

from skipper.control.cluster.hosts import protocol
from skipper.control.model.errors import AuthenticationError, DeadlineError, HostMismatchError, HostUnreachableError
from skipper.control.model.future import Promise
from skipper.control.wire import addresses, grpc_poller
from skipper.control.wire.auth import NOT_ADMITTED, NOT_OUR_SECRET
from skipper.control.wire.certificates import REVIEW_S, Certificates
from skipper.control.wire.identity import Role
from skipper.control.wire.messages import Answer, Message, Ping
from skipper.control.wire.process_ref import ProcessRef
from skipper.control.wire.version import DO_NOT_GO_TOGETHER


class AgentLink:
    """A connection with an agent; a context manager. For the agent, its end is the end of the script's job.

    Args:
        host: the IP of the agent.
        port: where it listens.
        secret: the agent's secret.
        certificates: for TLS; None: no TLS.
        timeout: in seconds, for the connection to stand.
        role: with TLS: the role that the other end must have.
        who: the listening side, for people.

    Raises:
        HostUnreachableError: no agent answers.
        AuthenticationError: the agent has another secret, or one side does not accept the other's certificate.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        certificates: Certificates | None,
        *,
        timeout: float,
        role: Role = Role.HOST,
        who: str = "agent",
    ) -> None:
        grpc_poller.choose()
        from skipper.control.wire.handshake import Dial
        from skipper.control.wire.link import Link
        from skipper.control.wire.message_stream import MessageStream, Status

        self.name = addresses.at(host, port)
        self._who = f"the {who} of {self.name}"
        self._secret = secret
        self._certificates = certificates
        self._revoked_s = 0.0
        """When the agent's certificate was first seen revoked; 0: it was not."""
        self._numbers = itertools.count(1)
        self._answers: dict[int, Promise[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        peer = ProcessRef(protocol.AGENT, self.name, self._who)
        me = ProcessRef(f"script-{secrets.token_hex(8)}", "", "script")
        self._link = Link(peer, self._deliver, self._lost)
        stands: Promise[None] = Promise()

        def opened(stream: MessageStream) -> None:
            self._link.connected, self._link.identity = True, dial.identity
            self._link.open(stream)
            stands.set_result(None)

        def failed(reason: str, status: Status) -> None:
            stands.settle_by(lambda: self._fail(reason))

        dial = Dial(
            me,
            peer,
            secret,
            on_open=opened,
            on_failure=failed,
            address=addresses.target(self.name),
            certificates=certificates,
            roles=(role,),
        )
        dial.stream.start(f"control-agent-{self.name}")
        try:
            stands.get(timeout)
        except DeadlineError:
            dial.give_up("nobody answers")
            hint = ", or it does not use TLS with these certificates" if certificates else ", or it accepts TLS only"
            message = (
                f"no {who} answers at {self.name} within {timeout:g} s: check that it runs there, and at this address"
            )
            raise HostUnreachableError(message + hint) from None

    def ask(self, method: str, content: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
        """Send the agent a request.

        Raises:
            HostError: it refuses, or is gone.
            HostUnreachableError: it does not answer in time.
        """
        number = next(self._numbers)
        future: Promise[dict[str, Any]] = Promise()
        with self._lock:
            self._answers[number] = future
        if self._link.lost is not None:
            self._tell_lost(self._link.lost)
        self._link.post(protocol.request(method, content, number))
        try:
            return future.get(timeout)
        except DeadlineError:
            raise HostUnreachableError(f"{self._who} did not answer within {timeout:g} s") from None
        finally:
            with self._lock:
                self._answers.pop(number, None)

    @property
    def lost(self) -> str | None:
        """Why the connection is gone, if it is."""
        return self._link.lost

    @property
    def secret(self) -> bytes:
        """The agent's secret."""
        return self._secret

    def review(self) -> None:
        """Close the connection if the agent's certificate has been revoked.

        It waits a while: the agent then ends the job's processes there, and the job's own links should first report why
        they end.
        """
        identity = self._link.identity
        if self._certificates is None or identity is None or self._link.lost is not None:
            return
        if not self._certificates.is_revoked(identity):
            return
        now = time.monotonic()
        self._revoked_s = self._revoked_s or now
        if now - self._revoked_s > REVIEW_S:
            self._lost(self._link, f"the certificate of {identity} was revoked")

    def ping(self) -> None:
        """Send a sign of life."""
        self._link.post(Ping())

    def wait_for_end(self, timeout: float) -> bool:
        """Wait until the agent is gone; False if it is still there."""
        deadline = time.monotonic() + timeout
        while self._link.lost is None and time.monotonic() < deadline:
            self.ping()
            time.sleep(0.1)
        return self._link.lost is not None

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._link.lose("it was closed")

    def __enter__(self) -> AgentLink:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _fail(self, reason: str) -> None:
        if NOT_OUR_SECRET in reason or "wrong proof" in reason:
            raise AuthenticationError(f"{self._who} has another secret")
        if DO_NOT_GO_TOGETHER in reason:
            raise HostMismatchError(f"{self._who} and this process disagree: {reason}")
        if NOT_ADMITTED in reason:
            raise AuthenticationError(f"{self._who} and this process disagree: {reason}")
        raise HostUnreachableError(f"{self._who} cannot be reached: {reason}")

    def _deliver(self, peer: ProcessRef, message: Message) -> None:
        future = self._answers.get(message.port) if isinstance(message, Answer) else None
        if future is not None:
            future.settle_by(lambda: protocol.read_answer(message))

    def _lost(self, link: object, reason: str) -> None:
        self._link.lose(reason)
        self._tell_lost(reason)

    def _tell_lost(self, reason: str) -> None:
        with self._lock:
            waiting = list(self._answers.values())
        for future in waiting:
            future.set_exception(HostUnreachableError(f"{self._who} has gone: {reason}"))
