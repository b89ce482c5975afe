"""Read an update in a thread of the worker, into a second set of weights, while the worker continues to compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread

import torch

from skipper.torchstore.adapters.vllm.load_form import config_beside
from skipper.torchstore.adapters.vllm.messages import TorchStoreUpdateInfo
from skipper.torchstore.adapters.vllm.reading import UpdateReader, UpdateRecord
from skipper.torchstore.adapters.vllm.second_set import SecondSet


class BackgroundReader:
    """A thread for one update, which starts at once.

    Args:
        reader: Reads the update into the second set.
        second_set: The second set.
        timeout: Timeout of the wait for its end, in seconds.
        ended: Called in the thread when it ends, with the error or an empty text.

    """

    def __init__(
        self, reader: UpdateReader, second_set: SecondSet, timeout: float, ended: Callable[[str], object]
    ) -> None:
        self._failure: Exception | None = None
        self._reader = reader
        self._second_set = second_set
        self._timeout = timeout
        self._ended = ended
        self._pieces: SimpleQueue[TorchStoreUpdateInfo | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="torchstore-background-read", daemon=True)
        self._thread.start()

    def add(self, info: TorchStoreUpdateInfo) -> None:
        """Let the thread read the next piece, after the earlier ones."""
        self._pieces.put(info)

    def give_up(self) -> None:
        """Read no further piece; the one that is being read ends by itself."""
        self._pieces.put(None)

    def wait(self, timeout: float) -> bool:
        """Wait until it has ended. Returns whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def result(self) -> None:
        """Wait until it has ended, and check that it has read everything.

        Raises:
            TimeoutError: It has not ended in time.
            Exception: The error in the thread.
        """
        if not self.wait(self._timeout):
            raise TimeoutError(f"the weights were not read after {self._timeout:g} s")
        if self._failure is not None:
            raise self._failure

    def flip(self) -> UpdateRecord:
        """Replace the first set by the second one, after `result` has returned; called in the thread that computes."""
        begin = time.perf_counter()
        self._second_set.flip()
        return self._reader.record(flip=self._second_set.flip_by, flip_s=time.perf_counter() - begin)

    def _run(self) -> None:
        try:
            with torch.no_grad(), config_beside(self._second_set.vllm_config):
                self._read()
        except Exception as error:  # noqa: BLE001  (the call that finishes the update raises it)
            self._failure = error
        finally:
            failure = self._failure
            with suppress(Exception):  # the trainer may be gone; then nobody waits
                self._ended("" if failure is None else f"{type(failure).__name__}: {failure}")

    def _read(self) -> None:
        try:
            while not self._reader.is_complete:
                info = self._pieces.get()
                if info is None:
                    raise RuntimeError("the update was aborted")
                self._reader.receive(info)
            self._reader.load()
            self._second_set.check()
        finally:
            self._reader.close()
