"""The trainer's wait for workers that read in the background."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from skipper.torchstore.adapters.board import ReaderState, tell
from skipper.torchstore.adapters.vllm.messages import question

_LOOK_S = (0.002, 0.05)  # between two looks at the board: at first, and at most
_ALIVE_S = 2.0  # how often the workers are asked whether they are alive


class ReadersWatch:
    """The trainer's wait for workers that read one update in the background.

    Args:
        update: The name of the update.
        timeout: Timeout of the wait, in seconds.
    """

    def __init__(self, update: str, timeout: float) -> None:
        self.update = update
        self._timeout = timeout

    def wait(self, send: Callable[[dict[str, Any]], None]) -> None:
        """Wait until all workers that have begun have read and loaded everything, or are gone.

        Args:
            send: Sends an update's info to all workers, through vLLM's client; returns when all live workers have
                answered.

        Raises:
            RuntimeError: A worker has failed.
            TimeoutError: A worker has not finished in time.
        """
        end, look_s = time.monotonic() + self._timeout, _LOOK_S[0]
        asked, next_question = 0, time.monotonic() + _ALIVE_S
        while reading := self._reading(asked):
            now = time.monotonic()
            if now > end:
                raise TimeoutError(f"{len(reading)} workers have not read the weights after {self._timeout:g} s")
            if now > next_question:
                send(question(self.update, asked + 1))
                asked, next_question = asked + 1, time.monotonic() + _ALIVE_S
                continue
            time.sleep(look_s)
            look_s = min(look_s * 1.5, _LOOK_S[1])

    def close(self) -> None:
        """Forget the update: it has ended, with or without an error."""
        tell("forget", self.update)

    def _reading(self, asked: int) -> list[str]:
        """The workers that still read. A worker that has not answered a question counts as gone, and is left out."""
        states: dict[str, ReaderState] = tell("readers", self.update)
        failures = sorted({state.ended for state in states.values() if state.ended})
        if failures:
            raise RuntimeError(f"workers could not read the weights: {'; '.join(failures)}")
        return [name for name, state in states.items() if state.ended is None and state.answered >= asked]
