"""What a process knows of itself when it is asked for its status."""

from __future__ import annotations

import resource
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

from skipper.control.observe.status import Activity, ActorStatus, ProcessReport, Transfers
from skipper.control.runtime.status_providers import figures_now, tables_now
from skipper.control.wire.bulk import traffic

if TYPE_CHECKING:
    from skipper.control.runtime.actor_state import ActorState
    from skipper.control.runtime.process import Process


def answer(process: Process, with_tables: bool | None) -> ProcessReport:
    """The report of this process."""
    lent, lent_nbytes = process.loans.outstanding()
    history = process.history
    children = process.children.alive()
    heard_messages, heard_nbytes = process.transport.heard()
    return ProcessReport(
        host=socket.gethostname(),
        started_s=history.started_s,
        rss_nbytes=_rss_nbytes(),
        cpu_s=time.process_time(),
        threads=threading.active_count(),
        links=process.transport.connected(),
        unhandled=process.flow.unhandled(),
        lent=lent,
        lent_nbytes=lent_nbytes,
        heard_messages=heard_messages,
        heard_nbytes=heard_nbytes,
        transfers=_transfers(),
        actors=[_actor(actor, "") for actor in process.actors.live()]
        + [_actor(actor, "ending") for actor in process.actors.ending()],
        deaths=list(history.deaths),
        deaths_total=history.deaths_total,
        restarts={child.ref.id: count for child in children if (count := history.deaths_of(child.ref.name))},
        errors_total=history.errors_total,
        errors=list(history.errors),
        last_error=history.last_error,
        figures=figures_now(),
        tables=tables_now() if with_tables else (),
    )


def _transfers() -> Transfers | None:
    moved = traffic()
    if moved is None:
        return None
    return Transfers(moved.in_flight, moved.done, moved.failed, moved.read_nbytes, moved.written_nbytes)


def _parked() -> set[int]:
    debugger = sys.modules.get("skipper.control.observe.debugger")  # not there before somebody has met a breakpoint
    return set() if debugger is None else debugger.parked_actors()


def _actor(actor: ActorState, state: str) -> ActorStatus:
    doing = [Activity(endpoint, for_s) for endpoint, for_s in actor.progress.handling()]
    if not state:
        state = "starting" if not actor.ready.done() else "busy" if doing else "idle"
        if actor.uid in _parked():
            state = "parked"
    assert actor.executor is not None  # actors enter the table with their executor
    return ActorStatus(
        name=actor.name,
        rank=dict(actor.rank),
        actor_id=actor.actor_id,
        class_name=actor.class_name,
        state=state,
        doing=doing,
        queued=actor.executor.depth(),
        handled=actor.progress.handled,
        errors=actor.progress.errors,
        last_error=actor.progress.last_error,
    )


def _rss_nbytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
