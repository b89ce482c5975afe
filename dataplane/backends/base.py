"""The interface of a backend: a way to reach memory that was registered in another process (or in this one).

A `Backend` knows whether it is usable, adds its section to exported handles, and connects. A `Peer` is one owner that a
backend reaches. A `Remote` is one registration of a peer. A `Transfer` is a compiled batch to one peer, which can be
started any number of times.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skipper.dataplane.config import Config
from skipper.dataplane.handle import Card, Handle, Sections
from skipper.dataplane.layout import Rows
from skipper.dataplane.operation import Atomic, FetchOperation, Helper, Operation
from skipper.dataplane.regions import Region

if TYPE_CHECKING:
    from skipper.dataplane.registration import Registration

Done = Callable[[BaseException | None], None]


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """Whether a backend can be used in this process, and why not.

    Example:
        ```python
        from skipper import dataplane
        from skipper.dataplane import BackendStatus

        status: BackendStatus
        for status in dataplane.backends():
            print(f"{status.name}: {'usable' if status.usable else status.reason}")
        ```
    """

    name: str
    usable: bool
    reason: str
    memory_kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Remote:
    """A peer's registration: its address, and the backend's own `key` to reach it."""

    handle: Handle
    address: int
    word: int
    key: Any


class Transfer(ABC):
    """A compiled batch of copies to or from one peer."""

    @abstractmethod
    def start(self, deadline: float, done: Done) -> Helper | None:
        """Begin; call `done` once, from any thread, perhaps before returning. The helper lets a waiting thread work."""

    def submit(self, timeout: float) -> Operation:
        """Begin it as an operation of its own; `DONE` if all has succeeded at once."""
        operation = Operation(1)
        helper = self.start(time.monotonic() + timeout, operation.part_done)
        if helper is not None:
            operation.add_helper(helper)
        return operation


class Peer(ABC):
    """One owner of memory that one backend reaches. Thread-safe."""

    backend: str

    @abstractmethod
    def resolve(self, handle: Handle) -> Remote:
        """Check the handle against the owner's real memory, without moving data."""

    @abstractmethod
    def copy(self, local: Region, remote: Remote, offset: int, *, to_remote: bool, timeout: float) -> Operation:
        """Move `local.nbytes` bytes between `local` and `offset` of the registration."""

    def stream(self, local: Region, remote: Remote, offset: int, *, timeout: float) -> Operation:
        """Read like `copy`; if the CPU copies, bypass the cache."""
        return self.copy(local, remote, offset, to_remote=False, timeout=timeout)

    @abstractmethod
    def compile(self, rows: Rows, remotes: Sequence[Remote], locals_: Sequence[Region], *, to_remote: bool) -> Transfer:
        """Prepare rows whose remote addresses and keys (indices) refer to `remotes`, and pin `locals_`."""

    @abstractmethod
    def atomic(self, remote: Remote, offset: int, atomic: Atomic, *, timeout: float) -> FetchOperation:
        """Change the aligned word at `offset` of the registration, at most once: never again over another path."""

    @abstractmethod
    def usable(self) -> bool:
        """Whether this object may be used again; if not, the caller makes a new connection."""

    @abstractmethod
    def close(self) -> None:
        """Release connections and mappings. Idempotent."""


class Backend(ABC):
    """A kind of transport, once per process.

    Attributes:
        name: As in `configure` and `RDMABuffer.backend`.
        number: Of its section in handles.
        reaches_all: Whether its sections are enough for every process of the host, so that no others are needed.
    """

    name: str
    number: int
    reaches_all: bool = True

    def check(self, config: Config) -> None:  # noqa: B027 - most backends have nothing to refuse
        """Raise ConfigurationError for a configuration that is too late or impossible. Changes nothing."""

    def configure(self, config: Config) -> None:  # noqa: B027 - most backends have nothing to configure
        """Apply a new configuration, which `check` has accepted."""

    @abstractmethod
    def status(self) -> BackendStatus:
        """Whether it can be used here. Starts nothing."""

    @abstractmethod
    def obstacle(self, handle: Handle) -> str | None:
        """Why this handle cannot be reached; None if it can."""

    @abstractmethod
    def connect(self, card: Card) -> Peer:
        """A new connection to the owner of the card."""

    @abstractmethod
    def export(self, registration: "Registration") -> Sections | None:
        """Sections of the card and of the body, by which peers reach a registration; None if they cannot.

        Raises:
            BackendUnavailableError: They cannot; says why.
            RegistrationError: They should, but the registration failed.
        """
