"""Why an answer is not there: what actors that have not answered are doing, for the message of a `DeadlineError`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from skipper.control.model.errors import ControlError
from skipper.control.model.future import Future
from skipper.control.runtime import running
from skipper.control.runtime.requests import ACTIVITY
from skipper.control.runtime.running import RunningProcess

if TYPE_CHECKING:
    from skipper.control.runtime.ports import Awaited

_MOST_ASKED = 3
"""How many of those that have not answered are named and asked."""


def name_all(missing: Sequence[Awaited], expected: int) -> str:
    """Who has not answered, in short."""
    if not missing:
        return "all have answered"
    if expected == 1:
        return missing[0].not_done()
    some = ", ".join(awaited.who for awaited in missing[:_MOST_ASKED])
    more = f" and {len(missing) - _MOST_ASKED} more" if len(missing) > _MOST_ASKED else ""
    return f"{len(missing)} of {expected} have not answered {missing[0].endpoint}: {some}{more}"


def ask(missing: Sequence[Awaited], expected: int) -> Callable[[], str]:
    """Ask those who have not answered what they are doing.

    Returns:
        What is known when it is called: `name_all`, and what has come by then.
    """
    if not running.is_running():
        return lambda: name_all(missing, expected)
    process = running.current()
    asked = [(awaited, _ask_one(process, awaited)) for awaited in missing[:_MOST_ASKED]]

    def known() -> str:
        found = [(awaited, _outcome(process, awaited, answer)) for awaited, answer in asked]
        if expected == 1:
            return f"{name_all(missing, expected)}; {found[0][1]}" if found else name_all(missing, expected)
        return "; ".join([name_all(missing, expected), *(f"{awaited.who}: {doing}" for awaited, doing in found)])

    return known


def _ask_one(process: RunningProcess, awaited: Awaited) -> Future[str] | None:
    if awaited.process is None or not _is_connected(process, awaited):
        return None  # a request would only wait for a connection, too
    return process.request(awaited.process, ACTIVITY, target=0 if awaited.actor is None else awaited.actor.uid)


def _is_connected(process: RunningProcess, awaited: Awaited) -> bool:
    if awaited.process_id == process.me.id:
        return True
    link = process.transport.find(awaited.process_id)
    return link is not None and link.connected


def _outcome(process: RunningProcess, awaited: Awaited, answer: Future[str] | None) -> str:
    where = f"its process ({awaited.process.name})" if awaited.process is not None else "its process"
    if answer is None:
        return f"{where} is not connected yet: it is being started, or cannot be reached"
    if not answer.done():
        return f"{where} does not say what it does: it is frozen, starved, or holds the interpreter lock"
    try:
        return answer.get(0)
    except ControlError as error:
        return str(error)
