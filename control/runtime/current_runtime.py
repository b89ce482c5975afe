"""The one runtime of this process: it starts with its first use and ends when the script ends."""

from __future__ import annotations

import atexit
import dataclasses
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from skipper import trust
from skipper.control.model import forked
from skipper.control.model import settings as bounds
from skipper.control.model.errors import AlreadyInJobError
from skipper.control.model.future import set_listener
from skipper.control.runtime import running, script_exit
from skipper.control.runtime.process import Process
from skipper.control.runtime.procs.ending import CLOSE_TIMEOUT_S
from skipper.control.runtime.procs.output_capture import Redirection
from skipper.control.runtime.procs.worker_config import WorkerConfig
from skipper.control.runtime.supervision import RootActor
from skipper.control.wire.addresses import at, host_of, within_host
from skipper.control.wire.auth import new_secret
from skipper.control.wire.process_ref import ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.loop import LoopThread

_current: Process | None = None
_loop_thread: LoopThread | None = None
_lock = threading.Lock()
_extensions: list[Callable[[Process], object]] = []
_at_start: list[Callable[[Process], object]] = []
_refuse: Callable[[], NoReturn] | None = None


def extend(extension: Callable[[Process], object]) -> None:
    """Register a function of a layer above that gets each process that starts later, before it can be reached."""
    _extensions.append(extension)


def at_start(call: Callable[[Process], object]) -> None:
    """Register a function that is called with the runtime of a script, or of a child, once that has started."""
    _at_start.append(call)


def current() -> Process:
    """The runtime of this process; in a script it starts with the first use.

    Raises:
        ForkedProcessError: this process is a forked copy of one that belongs to a job.
    """
    return _current or _start_root()


def _take_over(settings: bounds.Settings) -> list[str] | None:
    """Apply new bounds to the running job; returns the processes that keep the old ones."""
    process = _current
    if process is None:
        return None
    process.take_over(settings)
    return process.running()


bounds.on_change(_take_over)


def extensions() -> list[Callable[[Process], object]]:
    """The functions that get each process before it can be reached."""
    return list(_extensions)


def refuse_by(refuse: Callable[[], NoReturn]) -> None:
    """Set a function that raises if this process would start its own job, since it holds processes of another."""
    global _refuse
    _refuse = refuse


def is_running() -> bool:
    """Whether this process is part of a job at the moment."""
    return _current is not None


def new_process_ref(name: str, launcher: ProcessRef | None = None) -> ProcessRef:
    """A reference for a process that its launcher is about to start; without a launcher, for a script and its job.

    Other hosts reach it if they reach its launcher.
    """
    job = secrets.token_hex(4) if launcher is None else launcher.job
    process_id = f"{job}-{secrets.token_hex(8)}"
    host = "" if launcher is None else host_of(launcher.address)
    return ProcessRef(process_id, at(host, 0) if host else within_host(process_id), name, launcher)


def join_job(config: WorkerConfig, leave: Callable[[float], None]) -> None:
    """Start the runtime of a child process, which calls ``leave`` at its orderly end (see `Ending`)."""
    bounds.adopt(config.settings)
    is_open = config.data_plane_is_open
    process = _build(
        config.me,
        config.root,
        config.secret,
        config.certs,
        data_plane_is_open=is_open,
        redirection=config.redirection,
        leave=leave,
    )
    _take(process)
    for call in _at_start:
        call(process)
    meet_parent(process, config, _end_orphan)


def _end_orphan(reason: str) -> NoReturn:
    from skipper.control.runtime.procs.worker_config import EXIT_ORPHAN

    sys.stderr.write(f"control: process {current().me.name} ends: {reason}\n")
    sys.stderr.flush()
    os._exit(EXIT_ORPHAN)


def meet_parent(process: Process, config: WorkerConfig, end: Callable[[str], object]) -> None:
    """Make the runtime of a child dial its launcher; ``end`` ends the child, with the reason, if it loses that."""
    process.peer_failures.depend_on_launcher(end)
    process.transport.be_patient_with(config.parent)
    if not process.transport.is_elsewhere(config.root):
        process.transport.be_patient_with(config.root)  # the kernel reports its death; a frozen one may come back
    process.transport.link(config.parent)


def start_host(
    me: ProcessRef,
    root: ProcessRef,
    secret: bytes,
    settings: bounds.Settings,
    certs: str | None,
    *,
    data_plane_is_open: bool,
) -> Process:
    """Start the runtime of a job's process on a host; the script then dials it."""
    bounds.adopt(settings)
    process = _build(me, root, secret, certs, data_plane_is_open=data_plane_is_open)
    _take(process)
    process.transport.expect(root)
    return process


def start_joined(
    root: ProcessRef,
    secret: bytes,
    settings: bounds.Settings,
    name: str,
    *,
    host: str = "",
    certs: str | None = None,
    data_plane_is_open: bool = True,
) -> Process:
    """Start the runtime of a process that joins the job of ``root``, and begin to dial ``root``.

    Args:
        root: the script's process.
        secret: the job's secret.
        settings: the job's settings.
        name: of this process.
        host: the IP at which other hosts are to reach it; empty: only its own host reaches it.
        certs: the folder of the certificates for TLS with other hosts; None: none.
        data_plane_is_open: whether the data plane may be used with other hosts.

    Raises:
        AlreadyInJobError: this process is part of a job already.
        ForkedProcessError: it is a forked copy of a process that was.
    """
    with _lock:
        forked.check()
        if _current is not None:
            raise AlreadyInJobError(f"this process already belongs to a job, as {_current.me.name!r}")
        own = bounds.settings()
        bounds.adopt(settings)
        try:
            # The root counts as its launcher: processes that dial it after its death ask the root.
            me = new_process_ref(name, root)
            if host:
                me = dataclasses.replace(me, address=at(host, 0))
            process = _build(me, root, secret, certs, data_plane_is_open=data_plane_is_open)
        finally:
            bounds.adopt(own)  # for a job of its own, later
        _make_root(process, "joined")
        if not process.transport.is_elsewhere(root):
            process.transport.be_patient_with(root)  # the kernel reports its death; a frozen one may come back
        process.transport.link(root)
        _take(process)
        return process


def shutdown(*, grace_s: float | None = None) -> None:
    """Stop everything that the script has spawned, so that no process is left; the next use starts a new job.

    It runs by itself when the script ends, and may be called again. A process that has joined a job stops what it has
    spawned itself and leaves the job. In an actor's process it does nothing: its owner decides when it ends.

    Args:
        grace_s: seconds that actors get to handle what they have received and to run ``__cleanup__``, before they are
            killed; None means `Settings.exit_grace_s`.
    """
    with _lock:
        process = _current
        if process is None or process.root_actor is None:
            return
        grace_s = process.settings.exit_grace_s if grace_s is None else grace_s
        with script_exit.sheltered():
            process.ending.shutdown(grace_s=grace_s)
            process.root_actor.end_of_faults(time.monotonic() + grace_s)
            _take(None)
            trust.leave_job()


def _start_root() -> Process:
    with _lock:
        process = _current
        if process is not None:
            return process
        forked.check()
        if _refuse is not None:
            _refuse()
        me = new_process_ref("script")
        process = _build(me, me, new_secret())
        _make_root(process, "root")
        _take(process)
    for call in _at_start:
        call(process)
    return process


def _take(process: Process | None) -> None:
    """Set the runtime of this process; None: it has none."""
    global _current
    _current = process
    running.note(process)


def _build(
    me: ProcessRef,
    root: ProcessRef,
    secret: bytes,
    certs: str | None = None,
    *,
    data_plane_is_open: bool = True,
    redirection: Redirection | None = None,
    leave: Callable[[float], None] | None = None,
) -> Process:
    from skipper.control.runtime.assembly import build_process  # many processes import this module and start nothing

    return build_process(
        me,
        root,
        secret,
        _shared_loop(),
        certs,
        data_plane_is_open=data_plane_is_open,
        redirection=redirection,
        leave=leave,
        extensions=_extensions,
    )


def _make_root(process: Process, name: str) -> None:
    """Make this process the owner of what it spawns; nobody owns it."""
    root = RootActor(process.state, process.ports, name=name, shutdown=shutdown)
    process.own_as(root)
    set_listener(root.faults)
    script_exit.prepare()


def _shared_loop() -> LoopThread:
    from skipper.control.runtime import breakpoints
    from skipper.control.runtime.loop import LoopThread
    from skipper.control.runtime.procs import stack_file, thread_limit

    global _loop_thread
    breakpoints.install()
    if _loop_thread is None:
        thread_limit.check()
        stack_file.offer()
        _loop_thread = LoopThread()
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_forget)
    return _loop_thread


def _at_exit() -> None:
    script_exit.end()
    try:
        shutdown()
    finally:
        script_exit.set_exit_status()
    if _loop_thread is not None:
        _loop_thread.close(timeout=CLOSE_TIMEOUT_S)


def _forget() -> None:
    """Reset a forked copy of this process: it has none of the threads, and is no part of the job."""
    global _loop_thread, _lock
    if _current is not None:
        _current.fall_silent()
    forked.note("a process whose job has ended" if _current is None else _current.me.name)
    _take(None)
    _loop_thread = None
    set_listener(None)
    script_exit.forget()
    _lock = threading.Lock()  # a thread of the parent may have held the old one


running.start_by(_start_root)
