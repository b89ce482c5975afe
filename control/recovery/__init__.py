"""Recovery: what is done about a failure, by its type, and processes that are made anew in their place."""

from control.recovery.attached import AttachedHosts
from control.recovery.policy import (
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
from control.recovery.recoverable import Recoverable

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
