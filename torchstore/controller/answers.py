"""What requests were answered, so that one that comes again is not done again. No I/O."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from skipper.torchstore.errors import StoreError


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """What a request came to: a value, or an error."""

    outcome: Any

    def open(self) -> Any:
        """The value.

        Raises:
            StoreError: The request was refused.
        """
        if isinstance(self.outcome, StoreError):
            raise copy.copy(self.outcome)
        return self.outcome


class Answers:
    """The answers that clients may not have heard yet, by the clients' numbers of their requests."""

    def __init__(self) -> None:
        self._answers: dict[int, dict[int, RecordedAnswer]] = {}

    def find(self, client: int, request: int) -> RecordedAnswer | None:
        """What this request was answered, if it was."""
        return self._answers.get(client, {}).get(request)

    def put(self, client: int, request: int, oldest: int, outcome: Any) -> RecordedAnswer:
        """Remember an answer, and forget those before the client's ``oldest`` request that it still waits for."""
        answers = self._answers.setdefault(client, {})
        for number in [number for number in answers if number < oldest]:
            del answers[number]
        if isinstance(outcome, StoreError):  # its frames hold all that was asked for
            outcome.__traceback__ = outcome.__context__ = outcome.__cause__ = None
        answers[request] = RecordedAnswer(outcome)
        return answers[request]

    def forget(self, client: int) -> None:
        """Nobody will ask again."""
        self._answers.pop(client, None)

    def clear(self) -> None:
        """The store is shut down."""
        self._answers.clear()
