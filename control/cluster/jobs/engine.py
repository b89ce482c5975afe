"""What an engine that places processes on machines does for a job: the interface that each of them implements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class PlaceState(StrEnum):
    """The state of one place of a job.

    The example of `Job` shows one.
    """

    PENDING = "pending"
    """The engine has not started its agent yet, or the agent does not listen yet."""
    RUNNING = "running"
    ENDED = "ended"
    """Its agent has ended by itself, or was cancelled."""
    FAILED = "failed"
    """The engine could not start it, or has lost it."""


@dataclass(frozen=True, slots=True)
class Place:
    """One of the machines, or parts of machines, that an engine gives to a job.

    The example of `Job` shows one.

    Attributes:
        state: its state.
        address: where its agent listens, ``tcp://HOST:PORT``; None before it listens.
        name: name of the task, pod or node in the engine.
        reason: why it failed, in the engine's words; empty otherwise.
    """

    state: PlaceState
    address: str | None = None
    name: str = ""
    reason: str = ""


class Engine(Protocol):
    """An engine with one job: a number of places, on each of which ``skipper host serve`` runs.

    Every method raises `JobError` if the engine refuses or cannot be reached; none waits for a place to come up.
    """

    @property
    def secret_file(self) -> Path:
        """The file with the agents' secret, for this job only; it exists from `submit` on."""
        ...

    @property
    def certs(self) -> Path | None:
        """The folder with this machine's certificates for TLS, which exists from `submit` on; None: no TLS."""
        ...

    @property
    def is_elastic(self) -> bool:
        """Whether it can replace a place that is lost."""
        ...

    def submit(self, places: int) -> None:
        """Ask for this many places; returns when the engine has accepted the job."""
        ...

    def poll(self) -> Sequence[Place]:
        """The state of each requested place, in rank order."""
        ...

    def replace(self, rank: int) -> None:
        """Give up a place, and ask for another one with the same rank. Only if it `is_elastic`."""
        ...

    def log(self, rank: int) -> str:
        """The output so far of the agent of a place, and of the processes that it has started, both streams."""
        ...

    def cancel(self) -> None:
        """End what is left of the job; idempotent. Returns when the engine has accepted the request."""
        ...
