"""What the doctor says: checks with a verdict each, and the facts that they rest on.

As JSON:

    {"schema_version": 1, "tool": "doctor", "verdict": <the worst of the checks'>,
     "checks": [{"area": ..., "name": ..., "verdict": ..., "found": <a sentence>, "advice": <what to do, or "">}],
     "facts": {"system": {...}, "limits": {...}, "network": [...], "rdma": {...}, "ucx": {...}, "gpu": {...}}}
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SCHEMA_VERSION = 1


class Verdict(enum.StrEnum):
    """The verdict of a check.

    The example of `Examination` shows one.
    """

    OK = "ok"
    ABSENT = "absent"  # this machine does not have it, and nothing is wrong with that
    WARNING = "warning"  # works, but slower or less than it could
    PROBLEM = "problem"  # should work on this machine, and does not


_BY_WEIGHT = (Verdict.PROBLEM, Verdict.WARNING)


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    The example of `Examination` shows one.

    Attributes:
        area: What it belongs to: backends, within a host, memory, network, rdma, gpu.
        name: What it is.
        verdict: The verdict.
        found: What was found, in a sentence.
        advice: What to install or change, as a command or a setting; empty if there is nothing to do.
    """

    area: str
    name: str
    verdict: Verdict
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    """All checks, and the facts that they rest on.

    Example:
        ```python
        from skipper.dataplane.doctor import Check, Examination, Verdict, examine

        examination: Examination = examine()
        check: Check
        for check in examination.checks:
            if check.verdict is Verdict.PROBLEM:
                print(check.name, check.found, check.advice)
        ```
    """

    checks: Sequence[Check]
    facts: Mapping[str, Any]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the checks; "absent" counts as "ok"."""
        found = {check.verdict for check in self.checks}
        return next((verdict for verdict in _BY_WEIGHT if verdict in found), Verdict.OK)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "tool": "doctor",
            "verdict": str(self.verdict),
            "checks": [{**asdict(check), "verdict": str(check.verdict)} for check in self.checks],
            "facts": dict(self.facts),
        }
