"""What Slurm says of jobs: ``squeue``, asked as rarely as will do, since its controller serves the whole cluster."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence

from skipper.control.cluster.jobs.engine import Place, PlaceState
from skipper.control.model.errors import JobError

LOOK_S = 1.0
"""At most one question in so many seconds."""

PATIENCE_S = 60.0
"""For so long what was known last is good while the controller does not answer: it may be restarting."""

_COMMAND_S = 30.0

_ASKING = ("--noheader", "--array", "--states=all", "--format=%i|%T|%N|%r")

_UNKNOWN = "Invalid job id"
"""What Slurm says of jobs that ended so long ago that it has forgotten them."""

_ENDED = {
    "COMPLETED": "its agent has ended",
    "COMPLETING": "it ends",
    "CANCELLED": "it was cancelled",
}
_FAILED = {
    "FAILED": "its agent ended with an error",
    "TIMEOUT": "its time limit has come",
    "DEADLINE": "its deadline has come",
    "NODE_FAIL": "its node failed",
    "BOOT_FAIL": "its node could not be booted",
    "PREEMPTED": "it was preempted",
    "OUT_OF_MEMORY": "it ran out of memory",
}
_HAS_STARTED = ("RUNNING", "SUSPENDED", "STOPPED")


class Queue:
    """The jobs of Slurm that are the places of one job of ours."""

    def __init__(self) -> None:
        self._known: dict[str, Place] = {}
        self._looked_s = float("-inf")
        self._answered_s = float("-inf")

    def look(self, job_ids: Sequence[str]) -> dict[str, Place]:
        """What Slurm says of each; a place that runs, for it, is PENDING for us until its agent listens.

        Raises:
            JobError: the controller has not answered for some time.
        """
        now = time.monotonic()
        if now - self._looked_s < LOOK_S and all(job_id in self._known for job_id in job_ids):
            return self._known
        self._looked_s = now
        try:
            listed = _squeue(job_ids)
        except JobError:
            if now - self._answered_s > PATIENCE_S or any(job_id not in self._known for job_id in job_ids):
                raise
            return self._known
        self._answered_s = now
        forgotten = Place(PlaceState.ENDED, reason="Slurm has forgotten it: it ended some time ago")
        self._known = {job_id: listed.get(job_id, forgotten) for job_id in job_ids}
        return self._known


def _squeue(job_ids: Sequence[str]) -> dict[str, Place]:
    arrays = sorted({job_id.partition("_")[0] for job_id in job_ids})
    try:
        out = slurm("squeue", *_ASKING, f"--jobs={','.join(arrays)}")
    except JobError as error:
        if _UNKNOWN in str(error):
            return {}
        raise
    places = {}
    for line in out.splitlines():
        job_id, state, node, reason = (field.strip() for field in line.split("|", 3))
        places[job_id] = place_of(state, node, reason)
    return places


def place_of(state: str, node: str, reason: str) -> Place:
    """A place by the state of its job, of squeue(1), "JOB STATE CODES"."""
    if state in _ENDED:
        return Place(PlaceState.ENDED, name=node, reason=_ENDED[state])
    if state in _FAILED:
        return Place(PlaceState.FAILED, name=node, reason=f"{_FAILED[state]} ({state})")
    if state in _HAS_STARTED:
        return Place(PlaceState.RUNNING, name=node)
    return Place(PlaceState.PENDING, name=node, reason=f"{state}: {reason}")


def scancel(job_ids: Sequence[str]) -> None:
    """Cancel jobs, as far as they have not ended.

    Raises:
        JobError: the controller does not answer, or does not let us.
    """
    try:
        slurm("scancel", "--quiet", *job_ids)
    except JobError as error:
        if _UNKNOWN not in str(error):
            raise


def slurm(*command: str) -> str:
    """Run a program of Slurm for its output.

    Raises:
        JobError: it is not there, fails, or does not answer.
    """
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except FileNotFoundError:
        raise JobError(f"there is no {command[0]} here: this is no machine of a Slurm cluster") from None
    except subprocess.TimeoutExpired:
        raise JobError(f"{command[0]} does not answer within {_COMMAND_S:g} s") from None
    if done.returncode != 0:
        raise JobError(f"{command[0]} failed: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout
