"""`ProcessRef`: where a process is reached; and what is said of one whose link has ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from skipper.control.model.growing import growing

STOPPED = "it has stopped"
"""Why a link is lost whose other end said goodbye."""

NO_SIGN_OF_LIFE = "no sign of life"
"""Part of the reason why a link is lost whose other end has been silent for too long."""

BEATS = 8
"""How many signs of life are sent in the time for which a process may be silent."""

JUDGED = 0.9
"""The part of that time after which silence is judged: the rest is for the news to reach those who wait."""


@growing
@dataclass(frozen=True, slots=True)
class ProcessRef:
    """A process of the job, as others refer to it.

    Attributes:
        id: unique for ever, so that a restarted process is another one; begins with the id of the job and a dash.
        address: ``unix-abstract:NAME`` where only its host reaches it, else ``IP:PORT`` (see `addresses`).
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
