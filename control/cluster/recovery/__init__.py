"""Recovery: what to do about a failure, by its type, and new processes in place of failed ones."""

from skipper.control.cluster.recovery.policy import (
    Action,
    Attempt,
    Decision,
    Escalate,
    RecoveryPolicy,
    ReplaceHost,
    Replacer,
    Restart,
    Strategy,
)
from skipper.control.cluster.recovery.recoverable import AttachedHosts, Recoverable

__all__ = [
    # what to do
    "RecoveryPolicy",
    "Restart",
    "ReplaceHost",
    "Escalate",
    "Strategy",
    "Replacer",
    "AttachedHosts",
    # who does it
    "Recoverable",
    # what was decided and done
    "Action",
    "Decision",
    "Attempt",
]
