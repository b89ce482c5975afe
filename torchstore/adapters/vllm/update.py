"""One update of vLLM's workers, controlled by the trainer through vLLM's client."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from skipper.torchstore.adapters.vllm.messages import ABORT
from skipper.torchstore.adapters.vllm.readers import ReadersWatch


class WorkersUpdate:
    """A context manager for one update; if it exits before the update is finished, the workers keep their old weights.

    Args:
        client: vLLM's client, with its four methods, and optionally ``pause`` and ``resume``.
        seconds: Filled with the duration of each step: ``transfer_s``, ``pause_s``, ``load_s``, ``resume_s``.
        readers: The wait for workers that read in the background; None: they read during the call.

    Attributes:
        pieces: The pieces that the workers were told to read.
    """

    def __init__(self, client: Any, seconds: Counter[str], readers: ReadersWatch | None = None) -> None:
        self._client = client
        self._seconds = seconds
        self._readers = readers
        self._has_begun = False
        self.pieces: list[dict[str, Any]] = []

    def __enter__(self) -> WorkersUpdate:
        return self

    def __exit__(self, *error: object) -> None:
        if self._has_begun:
            self._give_up()
        if self._readers is not None:
            with suppress(Exception):  # the job may have ended
                self._readers.close()

    def transfer(self, update_info: dict[str, Any]) -> None:
        """Let the workers read a piece; with the last one, wait until they have read all of them."""
        with timed(self._seconds, "transfer_s"):
            if not self._has_begun:
                self._has_begun = True
                self._begin()
            self.pieces.append(update_info)
            if self._readers is None:
                self._client.update_weights(update_info)
                return
            self._client.update_weights(update_info | {"update": self._readers.update})
            if update_info["is_last"]:
                self._readers.wait(self._client.update_weights)

    def finish(self, version: str) -> None:
        """Let the workers load what they have read."""
        pause, resume = getattr(self._client, "pause", None), getattr(self._client, "resume", None)
        with timed(self._seconds, "pause_s"):
            if pause is not None:
                pause()
        try:
            with timed(self._seconds, "load_s"):
                self._has_begun = False  # workers that fail now have also ended it
                self._client.finish_weight_update(weight_version=version)
        finally:
            with timed(self._seconds, "resume_s"):
                if resume is not None:
                    resume()

    def _begin(self) -> None:
        try:
            self._client.start_weight_update()
        except Exception:  # noqa: BLE001  (a trainer may have died during an update: end that)
            self._give_up()
            self._has_begun = True
            self._client.start_weight_update()

    def _give_up(self) -> None:
        """End the update at the workers without a change. Workers that have failed have ended theirs, and say so."""
        self._has_begun = False
        for end in (lambda: self._client.update_weights(dict(ABORT)), self._client.finish_weight_update):
            with suppress(Exception):
                end()


@contextmanager
def timed(seconds: Counter[str], name: str) -> Iterator[None]:
    """Add the duration of the block, in seconds, to the step of this name."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] += time.perf_counter() - begin  # type: ignore[assignment]
