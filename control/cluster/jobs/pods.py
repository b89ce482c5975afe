"""What the statuses of pods, and of their Job, say about places: pure functions of Kubernetes' answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skipper.control.cluster.jobs.engine import Place, PlaceState
from skipper.control.wire import addresses

INDEX = "batch.kubernetes.io/job-completion-index"

_HOPELESS = {"InvalidImageName", "ErrImageNeverPull"}
"""Reasons to wait that only another manifest ends; others may pass."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of a job.

    Attributes:
        name: its name.
        uid: distinguishes it from earlier or later pods with that name.
        index: its index in the Job.
        created: its creation time, as text that sorts.
        is_leaving: whether it was deleted, and is not gone yet.
        status: its status in Kubernetes.
    """

    name: str
    uid: str
    index: int
    created: str
    is_leaving: bool
    status: Mapping[str, Any]

    @staticmethod
    def of(pod: Mapping[str, Any]) -> Pod:
        """Make it from Kubernetes' answer."""
        head = pod["metadata"]
        index = int(head["annotations"][INDEX])
        leaving = "deletionTimestamp" in head
        return Pod(head["name"], head["uid"], index, head["creationTimestamp"], leaving, pod.get("status", {}))

    @property
    def is_over(self) -> bool:
        """Whether it no longer runs."""
        return self.status.get("phase") in ("Succeeded", "Failed")


def place_of(pod: Pod | None, port: int) -> Place:
    """The place for a pod.

    Args:
        pod: the newest of its rank; None: there is none.
        port: where its agent listens once the pod is ready.
    """
    if pod is None:
        return Place(PlaceState.PENDING, reason="the Job has not created its pod yet")
    phase, name = pod.status.get("phase"), pod.name
    if phase == "Succeeded":
        return Place(PlaceState.ENDED, name=name, reason="its agent has ended")
    if phase == "Failed":
        return Place(PlaceState.FAILED, name=name, reason=_why_failed(pod.status))
    if phase == "Running" and _condition(pod.status, "Ready").get("status") == "True":
        address = addresses.SCHEME + addresses.at(pod.status["podIP"], port)
        return Place(PlaceState.RUNNING, address, name)
    reason, message = _why_waiting(pod.status)
    state = PlaceState.FAILED if reason in _HOPELESS else PlaceState.PENDING
    return Place(state, name=name, reason=_said(reason, message) or "its agent does not listen yet")


def failure_of(status: Mapping[str, Any], index: int) -> str:
    """Why a Job makes no more pods for an index; empty if it still does.

    Args:
        status: of the Job.
        index: the index.
    """
    failed = _condition(status, "Failed")
    if failed.get("status") == "True":
        return f"the Job has failed: {_said(failed.get('reason'), failed.get('message'))}"
    if _names(status.get("failedIndexes", ""), index):
        return "the Job gave up this index: too many of its pods were lost"
    return ""


def _names(text: str, index: int) -> bool:
    """Whether an index is among ``1,3-5``. Ranges are not expanded: they may have any size."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if int(first) <= index <= int(last or first):
            return True
    return False


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((one for one in status.get("conditions") or () if one["type"] == kind), {})


def _states(status: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    return [one["state"][kind] for one in status.get("containerStatuses") or () if kind in one.get("state", {})]


def _why_failed(status: Mapping[str, Any]) -> str:
    if status.get("reason"):  # the whole pod: Evicted, NodeLost, ...
        return _said(status["reason"], status.get("message"))
    for ended in _states(status, "terminated"):
        return _said(f"{ended.get('reason', 'its agent ended')} with status {ended['exitCode']}", ended.get("message"))
    return "the pod has failed"


def _why_waiting(status: Mapping[str, Any]) -> tuple[str, str]:
    for waiting in _states(status, "waiting"):
        return waiting.get("reason", ""), waiting.get("message", "")
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        return scheduled.get("reason", ""), scheduled.get("message", "")
    return "", ""


def _said(reason: str | None, message: str | None) -> str:
    return ": ".join(filter(None, (reason, message)))
