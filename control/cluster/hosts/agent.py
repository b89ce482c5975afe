"""`HostAgent`: the daemon of a machine that starts a process for every job which attaches this machine.

The agent runs no code of a script. It starts one process for each script (see `member`), which launches what the script
spawns on this host. The agent kills that process when the script closes the connection, or shows no sign of life for
longer than its job allows; the kernel then ends everything that the process has launched. The same happens when the
agent itself ends.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from skipper.control.cluster.hosts import protocol
from skipper.control.cluster.hosts.member import part_in_job
from skipper.control.model.errors import ControlError, HostError
from skipper.control.wire import addresses, grpc_poller
from skipper.control.wire.certificates import REVIEW_S, Certificates
from skipper.control.wire.identity import Role
from skipper.control.wire.link import Link
from skipper.control.wire.messages import Bye, Message, ProcessRequest
from skipper.control.wire.process_ref import JUDGED, ProcessRef
from skipper.control.wire.socket_forwarder import SocketForwarder

MEMBER = Path(__file__).with_name("member.py")

_TICK_S = 0.25
"""How often the agent checks that the scripts still show signs of life."""

_FROZEN_S = 1.0
"""A longer tick means that this process stood still; that time does not count as a script's silence."""

_log = logging.getLogger("skipper.control.cluster.hosts")


@dataclass(slots=True, eq=False)
class _Job:
    """What one script has on this host.

    Attributes:
        link: to the script.
        popen: the job's process.
        pidfd: readable once that process has ended.
        lifeline: the agent's end of a pipe, which closes when the agent ends.
        report: where it reports its address; None once it has.
        asked: number of the request to answer with that address.
        silence_s: how long the script may be silent. The job's process misses it much sooner, and ends.
        is_ending: whether it has been killed.
    """

    link: Link
    popen: subprocess.Popen[bytes]
    pidfd: int
    lifeline: int
    report: int | None
    asked: int
    silence_s: float
    is_ending: bool = False


class HostAgent:
    """The agent of this machine.

    Args:
        host: the IP to listen on.
        port: the port; 0: any.
        secret: the secret that scripts have to know.
        certs: the folder of the certificates for TLS; None: no TLS.
        idle_timeout_s: end after this many seconds without a job; None: never.
        listening: a socket that already listens there, which it takes over; None: it opens one.

    Raises:
        WireError: it cannot listen on the address.
        CertificateError: the folder lacks something that TLS needs, or the certificate is not a host's.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        *,
        certs: str | None = None,
        idle_timeout_s: float | None = None,
        listening: socket.socket | None = None,
    ) -> None:
        grpc_poller.choose()
        from skipper.control.wire.auth_listener import AuthListener

        self._secret = secret
        self._certs = None if certs is None else os.path.abspath(certs)
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, self._awake)
        self._todo: deque[Callable[[], object]] = deque()
        self._links: set[Link] = set()
        self._jobs: dict[Link, _Job] = {}
        self._draining = False
        self._ending = False
        self._idle_timeout_s = idle_timeout_s
        self._idle_since_s = time.monotonic()
        self._gone = threading.Event()
        self._certificates = None if certs is None else Certificates(certs)
        if self._certificates is not None:
            self._certificates.require(Role.HOST, "an agent")
        own = f"agent-{secrets.token_hex(8)}"
        where = addresses.at(host, port) if listening is None else addresses.within_host(own)
        self._auth_listener = AuthListener(
            [(where, self._certificates)],
            protocol.AGENT,
            secret,
            on_proven=self._came,
            on_closed=self._gone.set,
            roles=(Role.SCRIPT,),  # for all requests to an agent
        )
        self._reviewed_s = time.monotonic()
        self._forwarder = (
            None if listening is None else SocketForwarder(listening, addresses.within_host(own).partition(":")[2])
        )
        self.address = addresses.at(host, self._auth_listener.ports[0] if listening is None else port)
        """``IP:PORT``."""

    def run(self) -> None:
        """Serve until it must end, in the main thread: the processes that it starts end with its thread."""
        before = time.monotonic()
        while not (self._ending or (self._draining and not self._jobs)):
            for key, _ in self._selector.select(_TICK_S):
                key.data()
            while self._todo:
                self._todo.popleft()()
            before = self._look_for_life(before)
            self._review()
            self._reap_orphans()
            self._end_if_idle()
        for job in list(self._jobs.values()):
            self._end(job, "the agent ends")
        for link in list(self._links):
            link.post(Bye())
        self._auth_listener.close()
        if not self._gone.wait(0.5):
            self._auth_listener.cut()
            self._gone.wait(5.0)
        if self._forwarder is not None:
            self._forwarder.close()

    def end(self) -> None:
        """Make `run` end all jobs and return; from any thread, or a signal handler."""
        self._ending = True
        os.eventfd_write(self._wake, 1)

    def end_by_signals(self) -> None:
        """End the agent on SIGTERM and SIGINT."""

        def handle(number: int, frame: FrameType | None) -> None:
            self.end()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handle)

    def end_with(self, fd: int) -> None:
        """End the agent when a pipe ends: the pipe from the process that has started the agent."""

        def look() -> None:
            if not os.read(fd, 4096):
                self._selector.unregister(fd)
                _log.info("the process that started this agent is gone")
                self._ending = True

        self._selector.register(fd, selectors.EVENT_READ, look)

    # On the listener's thread

    def _came(self, guest: Any, peer: ProcessRef) -> None:
        link = Link(peer, lambda _, message: self._soon(self._ask, link, message), self._hung_up)
        link.connected, link.identity = True, guest.identity
        self._soon(self._links.add, link)
        from skipper.control.wire.handshake import WELCOME

        link.open(guest.stream, greeting=WELCOME)

    def _hung_up(self, link: Link, reason: str) -> None:
        self._soon(self._script_gone, link, reason)

    def _soon(self, call: Callable[..., object], *args: object) -> None:
        self._todo.append(functools.partial(call, *args))
        os.eventfd_write(self._wake, 1)

    # On the main thread

    def _awake(self) -> None:
        os.eventfd_read(self._wake)

    def _ask(self, link: Link, request: Message) -> None:
        if link.lost is not None or not isinstance(request, ProcessRequest):
            return  # its certificate has been revoked, or the message is not for agents
        try:
            content = protocol.read(request)
            if request.method == "attach":
                self._attach(link, request.reply_to, content)
            elif request.method == "drain":
                self._draining = True
                _log.info("this agent takes no new jobs and ends after its last job; %d are left", len(self._jobs))
                link.post(protocol.answer(request.reply_to, {"jobs": len(self._jobs)}))
            elif request.method == "status":
                names = [job.link.peer.name for job in self._jobs.values()]
                link.post(protocol.answer(request.reply_to, {"jobs": names, "versions": protocol.versions()}))
            else:
                raise HostError(f"this agent does not know the request {request.method!r}")
        except ControlError as error:
            link.post(protocol.refusal(request.reply_to, error))
        except (KeyError, TypeError, ValueError, OSError) as error:
            refusal = HostError(f"the request {request.method!r} failed: {type(error).__name__}: {error}")
            link.post(protocol.refusal(request.reply_to, refusal))

    def _attach(self, link: Link, number: int, content: dict[str, Any]) -> None:
        if self._draining:
            raise HostError(f"the host {self.address} is being drained: it takes no new jobs")
        protocol.check_versions(content["versions"], f"the host {self.address}")
        if link in self._jobs:
            raise HostError("this script has attached the host already")
        secret = protocol.mask(bytes.fromhex(content["masked_secret"]), self._secret, bytes.fromhex(content["nonce"]))
        config = {key: content[key] for key in ("me", "root", "settings", "sys_path", "open_data_plane")}
        config |= {"secret": secret.hex(), "certs": self._certs}
        _, _, settings = part_in_job(config)
        job = self._jobs[link] = _launch(link, number, config, settings.unresponsive())
        assert job.report is not None  # it has just been opened
        self._selector.register(job.report, selectors.EVENT_READ, lambda: self._reported(job))
        self._selector.register(job.pidfd, selectors.EVENT_READ, lambda: self._ended(job))
        _log.info("%s has attached this host: pid %d", content["root"]["name"], job.popen.pid)

    def _reported(self, job: _Job) -> None:
        line = os.read(job.report, 4096) if job.report is not None else b""
        self._close_report(job)
        if line:  # otherwise it has ended, which its pidfd shows
            job.link.post(protocol.answer(job.asked, {"address": line.decode().strip()}))
            job.asked = 0

    def _ended(self, job: _Job) -> None:
        """Note that the job's process has ended, by itself or by a kill."""
        status = job.popen.wait()
        self._close_report(job)
        self._selector.unregister(job.pidfd)
        os.close(job.pidfd)
        os.close(job.lifeline)
        if self._jobs.get(job.link) is job:
            del self._jobs[job.link]
        if job.asked:
            error = HostError(f"the job's process on {self.address} ended with status {status}; see the agent's output")
            job.link.post(protocol.refusal(job.asked, error))
        _log.info("the job's process with pid %d has ended with status %d", job.popen.pid, status)

    def _close_report(self, job: _Job) -> None:
        if job.report is not None:
            self._selector.unregister(job.report)
            os.close(job.report)
            job.report = None

    def _script_gone(self, link: Link, reason: str) -> None:
        link.lose(reason)
        self._links.discard(link)
        if (job := self._jobs.get(link)) is not None:
            self._end(job, reason)

    def _review(self) -> None:
        """Close the connections of scripts with revoked certificates; that ends their jobs here."""
        if self._certificates is None or time.monotonic() - self._reviewed_s < REVIEW_S:
            return
        for link in list(self._links):
            if link.identity is not None and self._certificates.is_revoked(link.identity):
                self._script_gone(link, f"the certificate of {link.identity} was revoked")
        self._reviewed_s = time.monotonic()

    def _end(self, job: _Job, reason: str) -> None:
        if not job.is_ending:
            job.is_ending = True
            _log.info("the job's process with pid %d is killed: %s", job.popen.pid, reason)
            signal.pidfd_send_signal(job.pidfd, signal.SIGKILL)

    def _reap_orphans(self) -> None:
        """Reap children that the agent has not started: the first process of a container inherits them."""
        ours = {job.popen.pid for job in self._jobs.values()}
        with contextlib.suppress(ChildProcessError):  # there are no children
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in ours:
                    break  # its pidfd shows it
                os.waitpid(ended.si_pid, 0)

    def _end_if_idle(self) -> None:
        now = time.monotonic()
        if self._jobs:
            self._idle_since_s = now
        elif self._idle_timeout_s is not None and now - self._idle_since_s > self._idle_timeout_s:
            _log.info("no job has attached this host for %g s: the agent ends", self._idle_timeout_s)
            self._ending = True

    def _look_for_life(self, before: float) -> float:
        now = time.monotonic()
        for link, job in list(self._jobs.items()):
            if now - before > _FROZEN_S:
                link.excuse(now - before)
            elif now - link.last_heard_s > JUDGED * job.silence_s and not job.is_ending:
                self._script_gone(link, f"its script sent no heartbeat for {job.silence_s:g} s")
        return now


def _launch(link: Link, number: int, config: dict[str, Any], silence_s: float) -> _Job:
    child_end, lifeline = os.pipe()
    report, tell = os.pipe()
    try:
        popen = subprocess.Popen(
            [sys.executable, str(MEMBER), str(child_end), str(tell), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=(child_end, tell),
        )
    except OSError:
        os.close(lifeline)
        os.close(report)
        raise
    finally:
        os.close(child_end)
        os.close(tell)
    with open(lifeline, "wb", closefd=False) as pipe:
        pipe.write(json.dumps(config).encode() + b"\n")
    return _Job(link, popen, os.pidfd_open(popen.pid), lifeline, report, number, silence_s)
