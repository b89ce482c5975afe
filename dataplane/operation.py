"""What a submitted transfer returns: awaitable, waitable, and done exactly once. With atomic operations on one word."""

import asyncio
import enum
import logging
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from skipper.dataplane.errors import TransferTimeoutError

_LOG = logging.getLogger(__name__)

LONGEST_S: Final = 1e9
"""Thirty years: longer timeouts are shortened to this, because the system cannot wait longer."""

Helper = Callable[[], bool | None]
"""Called by a waiting thread, to do part of the work; returns true if it should be called again."""

WORD_BYTES = 8
"""Size of a word, and its alignment: what RDMA devices and CPUs have in common."""

_MODULUS = 1 << 64
_LOWEST = -(1 << 63)


class Operation:
    """A transfer, or a batch of transfers, in flight.

    `await operation` in any event loop, or `operation.get()` in any thread; both return None when every byte has been
    transferred and every epoch was found valid, or raise the first error. The operation keeps the memory alive until
    then. The transfer also runs if nothing waits for the result.

    Example:
        ```python
        import numpy as np

        from skipper.dataplane import RDMABuffer

        buffer = RDMABuffer(np.ones(4, dtype=np.float32))
        operation = buffer.read_into(np.empty(4, dtype=np.float32))  # the transfer has begun
        operation.get(timeout=10)  # or: await operation
        ```
    """

    __slots__ = ("_callbacks", "_error", "_helpers", "_lock", "_pending", "_waiter")

    def __init__(self, parts: int) -> None:
        self._pending = parts
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Operation], None]] = []
        self._helpers: list[Helper] = []
        self._waiter: threading.Event | None = None

    @classmethod
    def failed(cls, error: BaseException) -> Self:
        """An operation that has already failed."""
        operation = cls(0)
        operation._error = error
        return operation

    def done(self) -> bool:
        """Whether it has ended, in success or in error."""
        return self._pending == 0

    @property
    def error(self) -> BaseException | None:
        """The error with which it failed; None if it succeeded, or is running and nothing has failed so far."""
        return self._error

    def get(self, timeout: float | None = None) -> None:
        """Wait until it has ended. The calling thread does work that no other thread has begun.

        Args:
            timeout: Seconds to wait here; None waits as long as the operation's own timeout lets it run. After this
                timeout the operation continues.

        Raises:
            DataplaneError: The transfer failed; see `dataplane.errors`.
            TransferTimeoutError: This timeout, or the operation's own, passed.
        """
        if self._pending:
            self._wait(timeout)
        if self._error is not None:
            raise self._error

    def add_done_callback(self, callback: Callable[["Operation"], None]) -> None:
        """Call `callback(self)` when it has ended: at once if it has, else in the thread that finishes it.

        The callback must be quick. If it raises and was not called at once, the exception is logged.
        """
        with self._lock:
            if self._pending:
                self._callbacks.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[asyncio.Future[None], None, None]:
        if self._pending:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            self.add_done_callback(lambda _: _resolve_threadsafe(loop, future))
            yield from future
        if self._error is not None:
            raise self._error

    def add_helper(self, helper: Helper) -> None:
        """For backends: add a function with which a waiting thread helps; it does nothing when all work has begun."""
        self._helpers.append(helper)

    def part_done(self, error: BaseException | None) -> None:
        """For backends: one of the parts has ended. The first error becomes that of the operation."""
        with self._lock:
            if error is not None and self._error is None:
                self._error = error
            self._pending -= 1
            if self._pending:
                return
            callbacks, self._callbacks = self._callbacks, []
            self._helpers = []
            if self._waiter is not None:
                self._waiter.set()
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # noqa: BLE001 - the caller's own code may raise anything
                # The thread that runs it carries other operations too, and their end must not depend on it.
                _LOG.exception("a done-callback of an operation raised")

    def _help(self) -> bool:
        """Do work in this thread; returns whether there may be more."""
        more = False
        for helper in tuple(self._helpers):
            more = bool(helper()) or more
        return more

    def _wait(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + require_timeout(timeout)
        while self._help():
            if deadline is not None and time.monotonic() >= deadline:
                break
        if not self._pending:
            return
        with self._lock:
            if not self._pending:
                return
            if self._waiter is None:
                self._waiter = threading.Event()
            waiter = self._waiter
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not waiter.wait(left):
            raise TransferTimeoutError(f"not done within {timeout} s; the operation itself goes on")


DONE = Operation(0)
"""The one object for all transfers that succeeded before their submission returned."""


def require_timeout(timeout: Any) -> float:
    """The timeout in seconds as a float, at most `LONGEST_S`.

    Raises:
        TypeError: It is no number.
        ValueError: It is not positive.
    """
    if type(timeout) is float and 0 < timeout < LONGEST_S:
        return timeout
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, not {type(timeout).__name__}")
    if not timeout > 0:
        raise ValueError(f"timeout must be positive, not {timeout}")
    return float(min(timeout, LONGEST_S))


def _resolve_threadsafe(loop: asyncio.AbstractEventLoop, future: "asyncio.Future[None]") -> None:
    try:
        loop.call_soon_threadsafe(_resolve, future)
    except RuntimeError:
        if not loop.is_closed():  # nothing waits in a loop that has been closed
            raise


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class AtomicKind(enum.Enum):
    """The operation on the word."""

    FETCH_ADD = 0
    COMPARE_AND_SWAP = 1


@dataclass(frozen=True, slots=True)
class Atomic:
    """One operation on one word, its numbers reduced to [0, 2**64).

    Attributes:
        kind: What is done.
        operand: What is added, or what the word becomes.
        compare: What the word must hold for a swap to take place.
    """

    kind: AtomicKind
    operand: int
    compare: int = 0

    @classmethod
    def fetch_add(cls, value: Any) -> "Atomic":
        """Add modulo 2**64.

        Raises:
            TypeError: `value` is no integer.
            ValueError: It is not in [-2**63, 2**64).
        """
        return cls(AtomicKind.FETCH_ADD, _reduced(value, "value"))

    @classmethod
    def compare_and_swap(cls, expected: Any, desired: Any) -> "Atomic":
        """Set to `desired` if it is `expected`.

        Raises:
            TypeError: One is no integer.
            ValueError: One is not in [-2**63, 2**64).
        """
        return cls(AtomicKind.COMPARE_AND_SWAP, _reduced(desired, "desired"), _reduced(expected, "expected"))


class FetchOperation(Operation):
    """An atomic operation in flight: `get()` and `await` return the previous value of the word, in [0, 2**64).

    It takes place once or not at all. If an error leaves open which of the two, the error says so: the operation is
    never retried silently.

    Attributes:
        previous: For backends: to be set before `part_done(None)`.

    Example:
        ```python
        import numpy as np

        from skipper.dataplane import FetchOperation, RDMABuffer

        words = np.zeros(2, np.uint64)
        buffer = RDMABuffer(words)
        operation: FetchOperation = buffer.fetch_add(1)
        print(operation.get(timeout=10), words[0])  # 0 1
        ```
    """

    __slots__ = ("previous",)

    def __init__(self, parts: int = 1) -> None:
        super().__init__(parts)
        self.previous = 0

    @classmethod
    def succeeded(cls, previous: int) -> "FetchOperation":
        """An operation that has already ended."""
        operation = cls(0)
        operation.previous = previous
        return operation

    # A caller that treats this as a plain operation ignores the result.
    def get(self, timeout: float | None = None) -> int:  # type: ignore[override]
        """Wait until it has ended.

        Args:
            timeout: Seconds to wait here; None waits as long as the operation's own timeout lets it run. After this
                timeout the operation continues.

        Returns:
            The previous value of the word. A swap has taken place if it is the expected one.

        Raises:
            DataplaneError: The operation failed; see `dataplane.errors`.
            TransferTimeoutError: This timeout, or the operation's own, passed.
        """
        super().get(timeout)
        return self.previous

    def __await__(self) -> Generator[asyncio.Future[None], None, int]:  # type: ignore[override]
        yield from super().__await__()
        return self.previous


def require_word(offset: Any, nbytes: int, address: int | None) -> int:
    """The offset of an 8-byte word within `nbytes` bytes.

    Args:
        offset: As the caller gave it.
        nbytes: Length of the buffer.
        address: Address of the buffer's first byte in its owner; None if the owner has dropped it.

    Raises:
        TypeError: The offset is no integer.
        ValueError: The word exceeds the buffer, or is not aligned in the owner's memory.
    """
    if isinstance(offset, bool) or not isinstance(offset, (int, np.integer)):
        raise TypeError(f"offset must be an integer number of bytes, not {type(offset).__name__}")
    at = int(offset)
    if at < 0 or at + WORD_BYTES > nbytes:
        raise ValueError(f"bytes [{at}, {at + WORD_BYTES}) are not a word within {nbytes} bytes")
    if address is not None and (address + at) % WORD_BYTES:
        raise ValueError(
            f"the word at offset {at} has the address {address + at:#x} in its owner, which is not a multiple of "
            f"{WORD_BYTES}; atomic operations need it to be"
        )
    return at


def _reduced(value: Any, role: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{role} must be an integer, not {type(value).__name__}")
    number = int(value)
    if not _LOWEST <= number < _MODULUS:
        raise ValueError(f"{role} must be in [-2**63, 2**64), not {number}")
    return number % _MODULUS
