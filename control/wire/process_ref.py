"""`ProcessRef`: the address of a process; and the reasons why its link has ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from skipper.control.model.growing import growing

STOPPED = "it has stopped"
"""The reason for a lost link whose other end said goodbye."""

NO_SIGN_OF_LIFE = "no sign of life"
"""Part of the reason for a lost link whose other end has been silent for too long."""

BEATS = 8
"""How many signs of life are sent during the time that a process may be silent."""

JUDGED = 0.9
"""The fraction of that time after which silence is judged: in the rest, the news reaches the waiting callers."""


@growing
@dataclass(frozen=True, slots=True)
class ProcessRef:
    """A reference to a process of the job.

    Attributes:
        id: unique for ever, so a restarted process has another one; begins with the id of the job and a dash.
        address: ``unix-abstract:NAME`` if only its host reaches it, else ``IP:PORT`` (see `addresses`).
        name: for people.
        launcher: the process that launched it and knows whether it lives; None for the script.
    """

    id: str
    address: str = field(compare=False)
    name: str = field(compare=False)
    launcher: ProcessRef | None = field(default=None, compare=False)

    @property
    def job(self) -> str:
        """The id of the job."""
        return self.id.partition("-")[0]

    def __str__(self) -> str:
        return self.name
