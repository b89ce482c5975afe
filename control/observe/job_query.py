"""`survey`: one question to every process of a job, down the tree of launched processes, and the answers up again.

So no further links are needed, and a process that does not answer is named by the one that launched it, which knows
why. `SUBJECTS` lists what may be asked; the functions run on a thread of their own in each process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skipper.control.model.errors import ControlError, LinkError
from skipper.control.model.exception_text import describe
from skipper.control.model.future import Promise
from skipper.control.runtime.messages import Loss, Mail
from skipper.control.runtime.replies import open_reply, pack_exception
from skipper.control.runtime.requests import Request
from skipper.control.wire.messages import Kind, Payload
from skipper.control.wire.payload import pack
from skipper.control.wire.process_ref import ProcessRef

if TYPE_CHECKING:
    from skipper.control.runtime.process import Process

SUBJECTS: dict[str, str] = {
    "status": "skipper.control.observe.status",
    "errors": "skipper.control.observe.errors",
    "stacks": "skipper.control.observe.stacks",
    "debug": "skipper.control.observe.debugger",
    "logs": "skipper.control.observe.log_forwarder",
    "tracing": "skipper.control.observe.tracing",
    "record": "skipper.control.observe.record_answer",
}
"""The module of each subject: its ``answer(process, argument)`` answers for the process itself, and, if it has them,
``answer_for(child, argument)`` answers for a child that does not, and ``passed_on(process, argument)`` gives the
argument for the processes below."""

_SHARE = 0.8
"""The part of the remaining time for the processes below: the process that waits for them has to answer, too."""


_SLACK_S = 1.0
_LOOKS_AT_ONCE = 4
_LAST_CHANCE_S = 0.1
"""For an answer that is late because of a process further below."""


@dataclass(frozen=True, slots=True)
class Question:
    """The question to all processes.

    Attributes:
        subject: one of `SUBJECTS`.
        argument: for its function.
        timeout_s: how long to wait for processes that do not answer.
        work_s: how long answering itself may take, beyond that.
    """

    subject: str
    argument: Any
    timeout_s: float
    work_s: float


@dataclass(frozen=True, slots=True)
class ProcessAnswer:
    """The answer of one process, or why there is none.

    Attributes:
        process: who.
        parent_id: id of the process that passed the question on to it; empty for the script.
        pid: its process id on its host; None if it is not known.
        packed: its answer, pickled; None if it gave none.
        problem: why there is no answer; empty if there is one.
        instead: what its parent found out about it from outside, pickled; None for nothing.
    """

    process: ProcessRef
    parent_id: str
    pid: int | None
    packed: bytes | None
    problem: str = ""
    instead: bytes | None = None

    def value(self) -> Any:
        """The answer; None if there is none."""
        return None if self.packed is None else pickle.loads(self.packed)

    def value_from_outside(self) -> Any:
        """What its parent found out about it; None for nothing."""
        return None if self.instead is None else pickle.loads(self.instead)


SURVEY: Request[Question, list[ProcessAnswer]] = Request("survey", "has not answered a question of a tool")
"""Answer a question to every process of the job, and get the answers of the processes below."""


def survey(
    process: Process, subject: str, argument: Any = None, *, timeout: float, margin: float = 0.0, work: float = 0.0
) -> list[ProcessAnswer]:
    """Ask every process of the job of ``process``, the script first, parents before children.

    Args:
        process: this one, which belongs to the job or visits it.
        subject: one of `SUBJECTS`.
        argument: plain data.
        timeout: seconds after which processes that have not answered are given up; the script itself has one more.
        margin: further seconds for their parents to find out about them from outside.
        work: seconds that answering itself may take, beyond all that.

    Raises:
        DeadlineError: (a `TimeoutError`) the script itself did not answer.
        SupervisionError: the script is gone.
    """
    question = Question(subject, argument, timeout * _SHARE, work)
    return process.request(process.root, SURVEY, question).get(timeout + _SLACK_S + margin + work)


def ask_below(process: Process, top: ProcessRef, subject: str, argument: Any, *, timeout: float) -> list[ProcessAnswer]:
    """Ask one process of the job and those below it.

    Raises:
        DeadlineError: (a `TimeoutError`) the process itself did not answer.
        SupervisionError: it is gone.
    """
    return process.request(top, SURVEY, Question(subject, argument, timeout * _SHARE, 0)).get(timeout)


def serve(process: Process, mail: Mail) -> None:
    """Answer a survey for this process and all below it; waits for them."""
    question = SURVEY.unpack(mail.message.payload)
    try:
        kind, payload = Kind.REPLY, pack(_collect(process, mail.sender, question))
    except Exception as error:  # noqa: BLE001  (the process that asks gets it, and need not wait)
        kind = Kind.FAILURE
        payload = pack_exception(error, actor_id=process.me.name, endpoint=f"survey {question.subject}")
    process.reply_to(mail.sender, mail.message, kind, payload)


def offspring(process: Process) -> list[ProcessRef]:
    """The processes that this one passes questions on to: it launched them, here or on hosts, or they joined it."""
    launched = [child.ref for child in process.children.alive()] + process.remote_launch.hosts()
    return launched + [mesh.root_members[0] for mesh in process.members.meshes()]


def _collect(process: Process, sender: ProcessRef, question: Question) -> list[ProcessAnswer]:
    deadline = time.monotonic() + question.timeout_s + question.work_s
    change = getattr(_module(question.subject), "passed_on", None)  # an invalid question goes to nobody
    argument = question.argument if change is None else change(process, question.argument)
    below = offspring(process)
    answers_below = _AnswerPort(below)
    port = process.ports.open(answers_below)
    passed_on = dataclasses.replace(question, argument=argument, timeout_s=question.timeout_s * _SHARE)
    for number, child in enumerate(below):
        process.send(child, SURVEY.message(passed_on, port=port, rank=number))
    answers = [_own_answer(process, sender, question)]
    instead: dict[int, tuple[bytes | None, str]] = {}
    try:
        answers_below.wait(deadline - time.monotonic())
        silent = {number: below[number] for number in answers_below.missing()}
        if silent:
            instead = _looked_at(process, silent, question)
            answers_below.wait(_LAST_CHANCE_S if instead else 0)
    finally:
        process.ports.close(port)
    for number, child in enumerate(below):
        came = answers_below.payloads[number]
        problem = answers_below.problems[number]
        if came is not None:
            try:
                answers.extend(open_reply(Kind.REPLY, came))
                continue
            except ControlError as error:
                problem = str(error)
        answers.append(_answer_for(process, child, question, problem, *instead.get(number, (None, ""))))
    return answers


def _own_answer(process: Process, sender: ProcessRef, question: Question) -> ProcessAnswer:
    # Its launcher has asked this process; the script was asked by a tool.
    parent = "" if process.me.id == process.root.id else sender.id
    try:
        packed = pickle.dumps(_module(question.subject).answer(process, question.argument), protocol=5)
    except Exception as error:  # noqa: BLE001  (any error here is part of the answer)
        return ProcessAnswer(process.me, parent, os.getpid(), None, f"it could not answer: {describe(error)}")
    return ProcessAnswer(process.me, parent, os.getpid(), packed)


def _looked_at(
    process: Process, silent: Mapping[int, ProcessRef], question: Question
) -> dict[int, tuple[bytes | None, str]]:
    """What can be found out from outside about children that do not answer, or why nothing can."""
    look = getattr(_module(question.subject), "answer_for", None)
    pids = {number: child.pid for number, ref in silent.items() if (child := process.children.get(ref.id)) is not None}
    if look is None:
        return {}

    def from_outside(pid: int) -> tuple[bytes | None, str]:
        try:
            return pickle.dumps(look(pid, question.argument), protocol=5), ""
        except Exception as error:  # noqa: BLE001  (any error here is part of the answer)
            return None, f"; {type(error).__name__}: {error}"

    with ThreadPoolExecutor(_LOOKS_AT_ONCE, thread_name_prefix="control-survey") as pool:
        looks = {number: pool.submit(from_outside, pid) for number, pid in pids.items() if pid is not None}
        return {number: found.result() for number, found in looks.items()}


def _answer_for(
    process: Process, child: ProcessRef, question: Question, problem: str, instead: bytes | None, trouble: str
) -> ProcessAnswer:
    known = process.children.get(child.id)
    pid = None if known is None else known.pid
    if not problem:
        link = process.transport.find(child.id)
        connected = link is not None and link.connected
        problem = f"no answer within {question.timeout_s:.2g} s" if connected else "its process has not connected yet"
    return ProcessAnswer(child, process.me.id, pid, None, problem + trouble, instead)


def _module(subject: str) -> Any:
    return importlib.import_module(SUBJECTS[subject])


class _AnswerPort:
    """The port for the answers of the processes below."""

    def __init__(self, below: Sequence[ProcessRef]) -> None:
        self.payloads: list[Payload | None] = [None] * len(below)
        self.problems = [""] * len(below)
        self._below = below
        self._missing = set(range(len(below)))
        self._all_there: Promise[None] = Promise()
        if not below:
            self._all_there.set_result(None)

    def wait(self, timeout: float) -> None:
        """Wait until all have answered, or are known not to, or the time is over."""
        with contextlib.suppress(TimeoutError):
            self._all_there.get(max(timeout, 0))

    def missing(self) -> list[int]:
        """The processes of which nothing has been heard."""
        return sorted(self._missing)

    def deliver(self, rank: int, kind: Kind, payload: Payload) -> bool:
        """Take an answer."""
        if kind is Kind.REPLY:
            self.payloads[rank] = payload
        else:
            try:
                open_reply(kind, payload)
            except ControlError as error:
                self.problems[rank] = str(error)
        return self._heard_of(rank)

    def process_lost(self, process_id: str, loss: Loss) -> bool:
        """Note why a process will not answer."""
        for rank in list(self._missing):
            if self._below[rank].id == process_id:
                self.problems[rank] = loss.reason
                self._heard_of(rank)
        return not self._missing

    def entrust(self, rank: int) -> None:
        """Do nothing: the port is not passed on."""

    def lapse(self, rank: int, error: LinkError) -> bool:
        """Do nothing: the port is not passed on."""
        return False

    def _heard_of(self, rank: int) -> bool:
        self._missing.discard(rank)
        if not self._missing:
            self._all_there.set_result(None)
        return not self._missing
