"""`Heartbeats`: signs of life on every link, and the end of links that show none.

The time limit starts with the last sign of life, and silence is judged after nine tenths of it, so that waiting callers
are told within it. Silence alone is no proof. For a process on this host, the kernel is asked first. A process that is
stopped or gone is given up. One that is alive lacks CPU time or its interpreter lock, and gets a second, longer limit,
which does not count the time during which it was kept from running. A process on another host is left to its launcher
there, which checks it in the same way, while the launcher is heard; silence decides only if the whole host is silent.
So a script and the processes on other hosts seldom send each other signs of life. Hosts do, and the script gets as many
of them as there are hosts, however many processes these have.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping

from skipper.control.wire.addresses import host_of
from skipper.control.wire.link import Link
from skipper.control.wire.messages import Ping
from skipper.control.wire.process_ref import BEATS, JUDGED, NO_SIGN_OF_LIFE, ProcessRef
from skipper.control.wire.vitals import Condition, Vitals, look_at, own_namespace

_log = logging.getLogger("skipper.control")


class Heartbeats:
    """The heartbeats of one process.

    Args:
        me: this process.
        links: its current links, by the process at the other end.
        silence_s: how long a process may be silent if it is stopped, or nothing else is known about it.
        unresponsive_s: how long a process may be silent if the operating system says that it is alive.
        is_elsewhere: whether a process is on another host.
        lose: gives up the link to a process, with the reason.
        script_id: the id of the script's process.
        pid: this process' id on this host; 0: it shares one with others.
    """

    def __init__(
        self,
        me: ProcessRef,
        links: Mapping[str, Link],
        *,
        silence_s: float,
        unresponsive_s: float,
        is_elsewhere: Callable[[ProcessRef], bool],
        lose: Callable[[ProcessRef, str], None],
        script_id: str,
        pid: int,
    ) -> None:
        self._me = me
        self._script_id = script_id
        self._links = links
        self._silence_s = silence_s
        self._unresponsive_s = unresponsive_s
        self._is_elsewhere = is_elsewhere
        self._lose = lose
        self._patient: set[str] = set()
        self._namespace = own_namespace()
        self._sign = Ping(pid, self._namespace)
        self._doubted: dict[str, tuple[Vitals, Vitals]] = {}
        """Processes that are silent but alive, with the first and the last look at them."""

    def be_patient_with(self, peer: ProcessRef) -> None:
        """Let silence alone never count as this peer's death. From any thread."""
        self._patient.add(peer.id)

    def is_patient_with(self, peer: ProcessRef) -> bool:
        """Whether silence never counts as this peer's death."""
        return peer.id in self._patient

    def greet(self, link: Link) -> None:
        """Send a sign of life on a link, with the process id of this process on this host."""
        link.post(self._sign)

    async def run(self) -> None:
        """Watch the links until cancelled; on the loop thread."""
        interval = self._silence_s / BEATS
        beat_s = time.monotonic() + interval
        due_s, seldom_s = beat_s, beat_s
        while True:
            await asyncio.sleep(max(due_s - time.monotonic(), 0))
            now = time.monotonic()
            links = [link for link in list(self._links.values()) if link.connected]
            if now - due_s > 2 * interval:
                for link in links:
                    link.excuse(now - due_s)  # this process itself stood still
            if now >= beat_s:
                beat_s, to_all = now + interval, now >= seldom_s
                if to_all:
                    seldom_s = now + self._unresponsive_s / BEATS
                for link in links:
                    if to_all or not self._is_quiet(link, now):
                        self.greet(link)
                for process_id in self._doubted.keys() - {link.peer.id for link in links}:
                    del self._doubted[process_id]  # it has ended in another way
            due_s = min([beat_s, *(self._judge(link, now) for link in links)])

    def _judge(self, link: Link, now: float) -> float:
        """Give up a link that has been silent for too long; returns when to look again, if before the next beat."""
        if self.is_patient_with(link.peer):
            return math.inf
        silence = now - link.last_heard_s
        limit = JUDGED * self._silence_s
        if silence < limit:
            if self._doubted.pop(link.peer.id, None) is not None and self._is_mine(link.peer):
                _log.warning("%s shows signs of life again", link.peer.name)
            return link.last_heard_s + limit
        if (reason := self._find_reason(link, silence, now)) is not None:
            self._doubted.pop(link.peer.id, None)
            self._lose(link.peer, f"it showed {NO_SIGN_OF_LIFE} for {silence:.3g} s{reason}")
        return math.inf

    def _find_reason(self, link: Link, silence: float, now: float) -> str | None:
        """Why a silent process must be given up, as the end of a sentence; None if it need not be."""
        if self._is_elsewhere(link.peer):
            is_over = silence >= self._unresponsive_s or not self._is_left_to_launcher(link, now)
            return "" if is_over else None
        if link.peer_pid == 0 or link.peer_namespace != self._namespace:
            return ""
        vitals = look_at(link.peer_pid)
        if vitals.condition is Condition.STOPPED:
            return f" and is stopped, by a signal or a debugger (state {vitals.state})"
        if vitals.condition is Condition.ENDED:
            return " and has ended"
        if vitals.condition is Condition.UNKNOWN:
            return ""
        first, last = self._doubted.get(link.peer.id, (vitals, vitals))
        self._doubted[link.peer.id] = first, vitals
        if silence - vitals.waited_s(first) >= self._unresponsive_s and not vitals.is_kept_waiting(last):
            used = f"state {vitals.state}, {vitals.cpu_s - first.cpu_s:.3g} s of CPU time meanwhile"
            return f" though it is not stopped ({used}): it is stuck, or holds the interpreter lock"
        if first is vitals and self._is_mine(link.peer):
            _log.warning(
                "%s (pid %d) has shown no sign of life for %.3g s, but is alive (state %s): it is short of CPU time, "
                "or something in it holds the interpreter lock. It counts as dead after %g s (unresponsive_s).",
                *(link.peer.name, link.peer_pid, silence, vitals.state, self._unresponsive_s),
            )
        return None

    def _is_mine(self, peer: ProcessRef) -> bool:
        return peer.launcher is not None and peer.launcher.id == self._me.id

    def _is_quiet(self, link: Link, now: float) -> bool:
        """Whether no sign of life is due, as on a link between the script and a process of another host.

        Both ends must agree, and the script knows the launchers of the processes that it has dialed itself.
        """
        is_of_script = link.is_dialed and self._me.id == self._script_id
        return (is_of_script or self._is_from_script(link)) and self._is_left_to_launcher(link, now)

    def _is_from_script(self, link: Link) -> bool:
        return link.peer.id == self._script_id and not link.is_dialed

    def _is_left_to_launcher(self, link: Link, now: float) -> bool:
        """Whether the launcher of a process on another host is there, too, and heard: then it reports the end.

        If the script has dialed, the launcher of this process reports the script's end: the launcher ends with the
        script, and the kernel reports that.
        """
        if not self._is_elsewhere(link.peer):
            return False
        from_script = self._is_from_script(link)
        launched = self._me if from_script else link.peer
        launcher = launched.launcher
        if launcher is None or host_of(launcher.address) != host_of(launched.address):
            return False
        above = self._links.get(launcher.id)
        if above is None or not above.connected:
            return False
        return from_script or now - above.last_heard_s < JUDGED * self._silence_s
