"""`RootActor`: the script as the root of the tree of owners; and what happens to failures that nobody handles."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from skipper.control.model import errors
from skipper.control.model.errors import ControlError, SupervisionError
from skipper.control.model.failure import FailureKind, MeshFailure
from skipper.control.model.future import Future, unheard
from skipper.control.model.shape import Extent, Point
from skipper.control.runtime import front_end, running, script_exit
from skipper.control.runtime.context import new_instance
from skipper.control.runtime.faults import Faults
from skipper.control.runtime.interfaces import OwnedMesh, OwnedMeshes
from skipper.control.runtime.messages import ROOT_UID, ActorRef
from skipper.control.runtime.replies import first_exception

if TYPE_CHECKING:
    from skipper.control.runtime.ports import PortTable
    from skipper.control.runtime.process_state import ProcessState


_log = logging.getLogger("skipper.control")

_LOOK_S = 2.0
"""How long the main thread may take to say whether it runs user code."""
_FOR_MORE_S = 0.5
"""How long the thread of a user's hook waits for one more failure: a host that dies takes many processes along."""


class RootActor:
    """The script as an actor: it owns what it spawns, and nobody owns it.

    A process that has joined the job of another script has one, too.

    Attributes:
        note_crash: called with each report of a failure that nobody has handled; returns text to print below it.
    """

    def __init__(self, state: ProcessState, ports: PortTable, *, name: str, shutdown: Callable[[], None]) -> None:
        self.uid = ROOT_UID
        self.name = name
        self.actor_id = f"{name}@{state.me.name}"
        self.rank = Point(0, Extent())
        self.ref = ActorRef(state.me, ROOT_UID, self.name, self.rank)
        self.meshes = OwnedMeshes()
        self.instance = new_instance(self, None)
        self.faults = Faults(ports.owed_by, self._nobody_heard)
        self._state = state
        self._shutdown = shutdown
        self._hook_lock = threading.Condition()
        self._to_tell: deque[MeshFailure] = deque()
        """Failures that a user's hook has not got yet."""
        self._hook: threading.Thread | None = None
        """The thread that the hook runs on, while there are such failures and for a moment after."""
        self._has_told_all = False
        """Whether the job is over, and that thread waits for no more of them."""
        self._tests: dict[str, str] = {}
        """The pytest test that has spawned a mesh, by the name of the mesh."""
        self.note_crash: Callable[[str], str] = lambda report: ""
        self._is_ending = False
        front_end.is_script()  # so that a run of pytest is recognized during the run

    def note_address(self) -> None:
        """Note that this process has another address from now on, as its state says."""
        self.ref = dataclasses.replace(self.ref, process=self._state.me)

    def own(self, mesh: OwnedMesh) -> None:
        """Take a mesh that the script has just spawned."""
        self.meshes.add(mesh)
        self.faults.expect()
        if test := front_end.running_test():
            self._tests[mesh.name] = test

    def owned_failed(self, failure: MeshFailure) -> None:
        """Pass a failure that nobody handled to the fault hook; a user's hook runs on a thread of its own."""
        if self._is_ending and _is_aftermath(failure):
            _log.info("while the script ends: %s", failure)
            return
        if _find_hook() is unhandled_fault_hook:
            self.take(failure)
            return
        with self._hook_lock:
            self._to_tell.append(failure)
            if self._hook is not None:
                self._hook_lock.notify()
                return  # it continues with this failure
            self._hook = hook = threading.Thread(
                target=self._tell_hook, args=(_FOR_MORE_S,), name="control-fault", daemon=True
            )
        try:
            hook.start()
        except RuntimeError:  # the interpreter ends
            self._hook = None
            self._tell_hook(0)

    def take(self, failure: MeshFailure) -> None:
        """Do the default action: wait until it is clear whether code hears of the failure."""
        self.faults.entrust(failure, at_once=failure.root_cause().actor_id == self.actor_id)

    def fail_by_itself(
        self, kind: FailureKind, message: str, cause: MeshFailure | None, error: BaseException | None = None
    ) -> None:
        """Fail the script because of something that it has done itself."""
        if not self._state.closing:
            exception = "" if error is None else first_exception(error)
            text = f"the script: {message}"
            self.owned_failed(
                MeshFailure(self.name, self.actor_id, self.rank, kind, text, "", cause, exception=exception)
            )

    def abort(self, reason: str) -> None:
        """Fail the script."""
        message = f"the script aborted: {reason}"
        self.owned_failed(MeshFailure(self.name, self.actor_id, self.rank, FailureKind.ABORT, message))

    def stop_itself(self) -> Future[None]:
        """Stop all that the script owns."""
        self._shutdown()
        return Future.of(None)

    def stop_owned(self, deadline: float) -> None:
        """Stop the script's meshes, and wait until a deadline (`time.monotonic`) at most."""
        self._is_ending = True
        # All at once, not one by one as an actor does: a busy mesh must not use up the grace of the others.
        left_s = max(deadline - time.monotonic(), 0)
        for end in [mesh.stop(left_s) for mesh in reversed(self.meshes.all())]:
            # It is busy, or its cleanup raised, which was logged; the rest is killed.
            with contextlib.suppress(ControlError), unheard():
                end.get(max(deadline - time.monotonic(), 0))

    def end_of_faults(self, deadline: float) -> None:
        """Report failures that nobody has heard of when the job is over, and make the process end with code 1."""
        with self._hook_lock:
            hook, self._has_told_all = self._hook, True
            self._hook_lock.notify()
        if hook is not None and hook is not threading.current_thread() and hook.is_alive():
            hook.join(max(deadline - time.monotonic(), 0))
        unheard = self.faults.close()
        if not unheard:
            return
        report = self._crash_report(unheard)
        if front_end.is_script():
            sys.stderr.write(f"control: unhandled failure, exiting with code 1\n{report}\n")
            sys.stderr.flush()
            script_exit.fail()
        else:
            front_end.tell(f"control: unhandled failure, found when the job ended\n{report}")

    def _tell_hook(self, for_more_s: float) -> None:
        """Call the hook with one failure after the other, until there are no more."""
        while True:
            with self._hook_lock:
                if not self._to_tell and not self._has_told_all:
                    self._hook_lock.wait(for_more_s)
                if not self._to_tell:
                    self._hook = None
                    return
                failure = self._to_tell.popleft()
            self._call_fault_hook(failure)

    def _call_fault_hook(self, failure: MeshFailure) -> None:
        try:
            _find_hook()(failure)
        except SystemExit as leave:
            self._leave(leave.code if isinstance(leave.code, int) else int(leave.code is not None))
        except BaseException:  # noqa: BLE001  (a hook that fails must not hide that the job has failed)
            traceback.print_exc()
            self._leave(1)

    def _nobody_heard(self, failure: MeshFailure) -> None:
        """End the script for a failure; at a prompt or in a test, raise it in what the user runs."""
        report = self._crash_report([failure])
        if front_end.is_script():
            sys.stderr.write(f"control: unhandled failure, exiting with code 1\n{report}\n")
            sys.stderr.flush()
            self._leave(1)
            return
        headline = f"control: unhandled failure\n{report}"
        test = self._tests.get(failure.mesh_name, "")  # none for a mesh of a fixture, perhaps for many tests

        def is_theirs(frame: FrameType | None) -> bool:
            return test in ("", front_end.running_test()) and front_end.runs_users_code(frame)

        if not script_exit.raise_in_main(SupervisionError(headline, failure), if_in=is_theirs, within_s=_LOOK_S):
            front_end.tell(headline)

    def _crash_report(self, failures: Sequence[MeshFailure]) -> str:
        report = "\n".join(failure.report() for failure in failures)
        return f"{report}{self.note_crash(report)}"

    def _leave(self, code: int) -> None:
        if self._is_ending:
            script_exit.fail(code)
        else:
            script_exit.leave(code, within_s=self._state.settings.fault_exit_s, end_children=self._shutdown)


def _is_aftermath(failure: MeshFailure) -> bool:
    """Whether a failure is a consequence of the script's end: running actors may call actors that have been stopped."""
    first = failure.root_cause()
    is_of_its_own = first.kind in (FailureKind.EXCEPTION, FailureKind.CONSTRUCTION, FailureKind.ABORT)
    is_undeliverable = first.kind is FailureKind.UNDELIVERED and first.exception != ""
    return not (is_of_its_own or is_undeliverable) or first.exception in _OF_AN_END


_OF_AN_END = frozenset({"ChannelClosedError", "CancelledError", *errors.names_of(SupervisionError)})


def unhandled_fault_hook(failure: MeshFailure) -> None:
    """What happens in the script when a failure has gone up the whole tree unhandled, and no code has seen it.

    Code has seen a failure if its cause was raised there: by `get`, ``await``, an iteration or a call. While a future
    holds the error, and for one second in any case, nothing happens. Then the failure is printed, `SystemExit` is
    raised in the main thread, and the script ends with code 1; if the main thread does not end within
    `Settings.fault_exit_s`, the script ends without it. In IPython, at a prompt and under pytest the failure is raised
    in the user's cell or test as `SupervisionError`, or printed if none is running, and nothing ends.

    Assign a function of your own to ``control.unhandled_fault_hook`` to do something else. It is called at once for
    every failure that reaches the script, seen or not, on another thread than the script's; if it returns, the script
    continues; if it raises `SystemExit`, the script ends with that code. It may call this function.
    """
    root = running.current().root_actor if running.is_running() else None
    if root is not None:
        root.take(failure)
        return
    sys.stderr.write(f"control: unhandled failure, exiting with code 1\n{failure.report()}\n")
    sys.stderr.flush()
    raise SystemExit(1)


def find_hook_by(find: Callable[[], Callable[[MeshFailure], object]]) -> None:
    """Set the function that finds the hook, which users may have put in place of `unhandled_fault_hook`."""
    global _find_hook
    _find_hook = find


_find_hook: Callable[[], Callable[[MeshFailure], object]] = lambda: unhandled_fault_hook  # noqa: E731
