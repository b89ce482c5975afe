"""What requests were answered, so that one that comes again is not done again. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchstore.errors import StoreError
from torchstore.recent import Recent

_REMEMBERED = 256  # of each client: as many may be under way when a controller is lost


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request came to: a value, or an error."""

    outcome: Any

    def open(self) -> Any:
        """The value.

        Raises:
            StoreError: The request was refused.
        """
        if isinstance(self.outcome, StoreError):
            raise self.outcome
        return self.outcome


class Answers:
    """The last answers to each client, by the client's numbers of its requests."""

    def __init__(self) -> None:
        self._answers: dict[int, Recent[int, Answer]] = {}

    def find(self, client: int, request: int) -> Answer | None:
        """What this request was answered, if it was."""
        answers = self._answers.get(client)
        return answers.get(request) if answers is not None else None

    def put(self, client: int, request: int, outcome: Any) -> Answer:
        """Remember an answer."""
        if client not in self._answers:
            self._answers[client] = Recent(_REMEMBERED)
        return self._answers[client].put(request, Answer(outcome))

    def forget(self, client: int) -> None:
        """Nobody will ask again."""
        self._answers.pop(client, None)

    def clear(self) -> None:
        """The store is shut down."""
        self._answers.clear()
