"""`RecoveryPolicy`: what to do about a failure, decided from its type and from earlier actions.

A decision is a pure function of the failure, the history and the time. `Recoverable` carries it out.
"""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from skipper.control.api.mesh import HostMesh
from skipper.control.model.failure import FailureKind, MeshFailure


class Action(enum.Enum):
    """What a policy does about a failure.

    The example of `Decision` shows one.
    """

    RESTART = "restart"
    """The processes are started again, where they were."""
    REPLACE_HOST = "replace host"
    """The engine is asked for another host in place of a lost one, and the processes are started there."""
    ESCALATE = "escalate"
    """The owner fails, too, and its own owner is asked."""


class Replacer(Protocol):
    """A job of an engine that places hosts, such as those of `control.cluster.jobs`."""

    def replace(self, *, timeout: float) -> HostMesh:
        """Replace all lost hosts; the new ones are successors of the lost ones (see `HostMesh.latest`)."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the processes again where they were: ``attempts`` times within ``within_s`` seconds.

    The example of `RecoveryPolicy` shows one.

    Attributes:
        attempts: maximum number of attempts; those before the last change of hosts do not count.
        within_s: attempts longer ago than this do not count either.
        backoff_s: seconds before the second attempt; it doubles with each further one. The first starts at once.
        longest_backoff_s: maximum of these seconds.
    """

    attempts: int = 3
    within_s: float = 60.0
    backoff_s: float = 0.1
    longest_backoff_s: float = 10.0

    def __post_init__(self) -> None:
        _check(self.attempts, self.within_s, self.backoff_s, self.longest_backoff_s)

    def propose(self, history: Sequence[Attempt], now_s: float) -> Decision | None:
        """What to do by this strategy; None where it is used up."""
        replaced = [
            at for at, attempt in enumerate(history) if attempt.action is Action.REPLACE_HOST and attempt.is_done
        ]
        since = history[replaced[-1] + 1 :] if replaced else history
        made = _recent(since, Action.RESTART, self.within_s, now_s)
        if made >= self.attempts:
            return None
        delay_s = _delay_s(made, self.backoff_s, self.longest_backoff_s)
        reason = f"restart {made + 1} of at most {self.attempts} within {self.within_s:g} s"
        return Decision(Action.RESTART, delay_s, reason)


@dataclass(frozen=True, slots=True)
class ReplaceHost:
    """Ask the engine to replace lost hosts: ``attempts`` times within ``within_s`` seconds.

    It may be passed to actors of the process that has the job (``this_proc().spawn``), but to no others.

    The example of `AttachedHosts` shows one.

    Attributes:
        job: the job that is asked for another host.
        attempts: maximum number of attempts.
        within_s: attempts longer ago than this do not count.
        timeout_s: time for the engine.
        backoff_s: seconds before the second attempt; it doubles with each further one.
        longest_backoff_s: maximum of these seconds.
    """

    job: Replacer
    attempts: int = 2
    within_s: float = 3600.0
    timeout_s: float = 300.0
    backoff_s: float = 1.0
    longest_backoff_s: float = 60.0

    def __post_init__(self) -> None:
        _check(self.attempts, self.within_s, self.backoff_s, self.longest_backoff_s)
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")

    def propose(self, history: Sequence[Attempt], now_s: float) -> Decision | None:
        """What to do by this strategy; None where it is used up."""
        made = _recent(history, Action.REPLACE_HOST, self.within_s, now_s)
        if made >= self.attempts:
            return None
        reason = f"replacement of a host, {made + 1} of at most {self.attempts} within {self.within_s:g} s"
        delay_s = _delay_s(made, self.backoff_s, self.longest_backoff_s)
        return Decision(Action.REPLACE_HOST, delay_s, reason, replace=self)

    def ask(self) -> None:
        """Ask for replacements and wait for them. One caller asks at a time, for all lost hosts together.

        Raises:
            JobError: the engine has no replacement.
            TimeoutError: the replacements did not come in time.
        """
        with _asking:
            self.job.replace(timeout=self.timeout_s)

    def __reduce__(self) -> tuple[Any, ...]:
        _jobs[id(self.job)] = self.job
        bounds = (self.attempts, self.within_s, self.timeout_s, self.backoff_s, self.longest_backoff_s)
        return (_in_this_process, (os.getpid(), id(self.job), bounds))


@dataclass(frozen=True, slots=True)
class Escalate:
    """Pass the failure on to the owner of the owner.

    The example of `RecoveryPolicy` shows one.
    """

    def propose(self, history: Sequence[Attempt], now_s: float) -> Decision | None:
        """The action of this strategy: always the same."""
        return Decision(Action.ESCALATE, 0.0, "the policy passes the failure on to the owner's owner")


Strategy = Restart | ReplaceHost | Escalate


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt to recover from a failure.

    The example of `Decision` shows one.

    Attributes:
        action: what was tried.
        at_s: when, as `time.monotonic` counts.
        is_done: whether it succeeded; an engine may have no other host.
    """

    action: Action
    at_s: float
    is_done: bool = True


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy decides about a failure.

    Attributes:
        action: what to do.
        delay_s: seconds to wait before it.
        reason: explanation for people.
        replace: the strategy that replaces the host, if that is the action.

    Example:
        ```python
        from skipper.control.cluster.recovery import Action, Attempt, Decision, Restart

        restart = Restart(attempts=2, within_s=60.0, backoff_s=0.5)
        first: Decision | None = restart.propose([], now_s=100.0)
        print(first is not None and first.action is Action.RESTART and first.delay_s)  # 0.0
        history = [Attempt(Action.RESTART, at_s=100.0), Attempt(Action.RESTART, at_s=101.0)]
        print(restart.propose(history, now_s=102.0))  # None
        ```
    """

    action: Action
    delay_s: float
    reason: str
    replace: ReplaceHost | None = None


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """What to do about failures: the first strategy of the failure's ladder that is not used up.

    The ladder of a failure is ``process``, then ``host``, then ``otherwise``; kinds of failures can have a ladder of
    their own. A failed ``__init__`` has no ladder by default: the same arguments would fail in the same way.

    Attributes:
        process: the strategy for processes that end, crash, freeze or lose their link; None: skip this step.
        host: the strategy if that does not last; None: there is no engine to ask.
        otherwise: the strategy when all others are used up.
        kinds: ladders by the kind of the first failure, in place of the one above.

    Example:
        ```python
        from skipper.control import FailureKind
        from skipper.control.cluster.recovery import Escalate, RecoveryPolicy, Restart

        policy = RecoveryPolicy(
            process=Restart(attempts=3, within_s=60.0, backoff_s=0.1),
            kinds={FailureKind.EXCEPTION: (Escalate(),)},  # an exception is a mistake, which a restart repeats
        )
        ```
    """

    process: Restart | None = field(default_factory=Restart)
    host: ReplaceHost | None = None
    otherwise: Strategy = field(default_factory=Escalate)
    kinds: Mapping[FailureKind, Sequence[Strategy]] = field(default_factory=dict)

    def ladder(self, failure: MeshFailure, *, is_host_lost: bool = False) -> list[Strategy]:
        """The strategies for a failure, the first one first."""
        kind = failure.root_cause().kind
        ladder: list[Strategy] = [strategy for strategy in (self.process, self.host) if strategy is not None]
        if kind in self.kinds:
            ladder = [*self.kinds[kind]]
        elif not failure.is_recoverable():
            ladder = []
        if is_host_lost and any(isinstance(strategy, ReplaceHost) for strategy in ladder):
            ladder = [strategy for strategy in ladder if not isinstance(strategy, Restart)]
        return [*ladder, self.otherwise]

    def decide(
        self, failure: MeshFailure, history: Sequence[Attempt], now_s: float, *, is_host_lost: bool = False
    ) -> Decision:
        """Decide what to do about a failure.

        Args:
            failure: the failure, as the owner received it.
            history: earlier attempts, the oldest first.
            now_s: the present time, by the clock of the history.
            is_host_lost: whether a host of the processes is known to be lost. If an engine can replace it, the policy
                does not try a restart there first.
        """
        for strategy in self.ladder(failure, is_host_lost=is_host_lost):
            if (decision := strategy.propose(history, now_s)) is not None:
                return decision
        return Decision(Action.ESCALATE, 0.0, "the policy allows no further attempt")

    def remembered(self, history: Sequence[Attempt], now_s: float) -> list[Attempt]:
        """The part of a history that still counts."""
        ladders = [[self.process, self.host, self.otherwise], *self.kinds.values()]
        bounded = (each for ladder in ladders for each in ladder if isinstance(each, Restart | ReplaceHost))
        longest_s = max((each.within_s for each in bounded), default=0.0)
        return [attempt for attempt in history if now_s - attempt.at_s < longest_s]


_asking = threading.Lock()

_jobs: dict[int, Replacer] = {}
"""Jobs that have been passed to actors, by identity: a job stays in its process, and is needed as long as that."""


def _in_this_process(pid: int, key: int, bounds: tuple[int, float, float, float, float]) -> ReplaceHost:
    job = _jobs.get(key) if pid == os.getpid() else None
    if job is None:
        raise ValueError(
            "only the process of the job can ask it for hosts: spawn the owner there, by this_proc().spawn(...)"
        )
    return ReplaceHost(job, *bounds)


def _recent(history: Sequence[Attempt], action: Action, within_s: float, now_s: float) -> int:
    return sum(attempt.action is action and now_s - attempt.at_s < within_s for attempt in history)


def _delay_s(made: int, backoff_s: float, longest_backoff_s: float) -> float:
    """The wait after ``made`` attempts. The doubling stops at a hundred, which is longer than any wait."""
    return min(backoff_s * 2.0 ** min(made - 1, 100), longest_backoff_s) if made else 0.0


def _check(attempts: int, within_s: float, backoff_s: float, longest_backoff_s: float) -> None:
    if not isinstance(attempts, int) or isinstance(attempts, bool):
        raise TypeError(f"attempts must be an int, not {attempts!r}")
    if attempts < 1:
        raise ValueError(f"attempts must be at least 1, got {attempts}")
    if within_s <= 0:
        raise ValueError(f"within_s must be positive, got {within_s}")
    if backoff_s < 0 or longest_backoff_s < 0:
        raise ValueError("a back-off must not be negative")
