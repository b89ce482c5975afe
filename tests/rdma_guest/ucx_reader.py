"""A reader in a process of its own, since a process has one UCX with one configuration for its whole life."""

import threading

import numpy as np

from skipper.dataplane import DataplaneError, RDMABuffer
from tests.conformance.owner import Memory, main

PATIENCE_S = 20.0


class Reader(Memory):
    """What the process can be told to do."""

    def read_value(self, handle: bytes, timeout: float) -> set[int]:
        """What the bytes of a buffer are: one value where all is well."""
        buffer = RDMABuffer.deserialize(handle)
        into = np.zeros(buffer.nbytes, np.uint8)
        buffer.read_into(into, timeout=timeout).get()
        return set(np.unique(into).tolist())

    def move_until_it_fails(
        self, lost: bytes, kept: bytes, to_remote: bool, timeout: float
    ) -> tuple[DataplaneError, int, int]:
        """Read or write one owner's buffer again and again until that fails; read another one's all the time.

        Returns:
            What the last operation raised; how many had succeeded before it; how many reads of the other owner's
            buffer succeeded during it.

        Raises:
            DataplaneError: The other owner's buffer could not be read.
        """
        buffer = RDMABuffer.deserialize(lost)
        memory = np.zeros(buffer.nbytes, np.uint8)
        before = 0
        with Beside(kept) as beside:
            while True:
                already = beside.count
                operation = (buffer.write_from if to_remote else buffer.read_into)(memory, timeout=timeout)
                try:
                    operation.get()
                except DataplaneError as error:
                    return error, before, beside.count - already
                before += 1


class Beside:
    """Reads a buffer again and again in a thread of its own."""

    def __init__(self, handle: bytes) -> None:
        self.count = 0
        self._buffer = RDMABuffer.deserialize(handle)
        self._into = bytearray(self._buffer.nbytes)
        self._error: DataplaneError | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> "Beside":
        self._read_once()  # connects
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _read_once(self) -> None:
        self._buffer.read_into(self._into, timeout=PATIENCE_S).get()

    def _read(self) -> None:
        while not self._over.wait(0.005):  # between two reads the other transfer has the processor
            try:
                self._read_once()
            except DataplaneError as error:
                self._error = error
                return
            self.count += 1


if __name__ == "__main__":
    main(Reader)
