"""`SlurmJob`: hosts that Slurm places, through submitit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipper.control.cluster.jobs.authority import Authority
from skipper.control.cluster.jobs.engine import Place, PlaceState
from skipper.control.cluster.jobs.folder import JobFolder, place_behind, read_log
from skipper.control.cluster.jobs.job import Job
from skipper.control.model.errors import JobError, JobLibraryError

if TYPE_CHECKING:
    from submitit import SlurmExecutor

TASK = Path(__file__).with_name("slurm_task.py")

LOOK_S = 1.0
"""At most one query in this many seconds."""

PATIENCE_S = 60.0
"""How long the last known state is used while the controller does not answer: it may be restarting."""

_COMMAND_S = 30.0

_ASKING = ("--noheader", "--array", "--states=all", "--format=%i|%T|%N|%r")

_UNKNOWN = "Invalid job id"
"""Slurm's message for jobs that ended so long ago that it has forgotten them."""

_ENDED = {"COMPLETED": "its agent has ended", "COMPLETING": "it ends", "CANCELLED": "it was cancelled"}
_FAILED = {
    "FAILED": "its agent ended with an error",
    "TIMEOUT": "its time limit was reached",
    "DEADLINE": "its deadline was reached",
    "NODE_FAIL": "its node failed",
    "BOOT_FAIL": "its node could not be booted",
    "PREEMPTED": "it was preempted",
    "OUT_OF_MEMORY": "it ran out of memory",
}
_HAS_STARTED = ("RUNNING", "SUSPENDED", "STOPPED")


class SlurmJob(Job):
    """Agents as jobs of Slurm: one each, so that a lost one can be replaced. Elastic.

    The jobs are submitted as one array, and start as nodes become free; `hosts` waits for all of them. Slurm does not
    requeue them: `replace` asks for new ones. They end with this process; if it is killed, after ``idle_timeout_s``
    without a script.

    Args:
        places: how many, each a node or a part of one.
        partition: the partition; None: the default one.
        account: the account.
        time_min: the time limit, in minutes.
        gpus_per_node: GPUs of each place.
        cpus_per_task: processors of each place.
        mem_gb: memory of each place, in GiB.
        setup: shell lines that run on a node before the agent, such as ``module load cuda``.
        parameters: other parameters of `submitit.SlurmExecutor`: ``qos``, ``constraint``, ``exclusive``, ...
        name: name of the jobs.
        folder: a folder on a file system that this machine and all nodes see; the job makes a folder in it, of mode
            0700, for its secret and its logs.
        interface: the network device whose IPv4 address is that of the node; None: NodeAddr of Slurm.
        idle_timeout_s: how long an agent waits for a script, and so how long after ``start`` the script may call
            ``hosts``.
        insecure: use no TLS to other machines. Otherwise the job makes certificates in its folder for each node.
        address: the IP at which the nodes reach this script.
        data_plane: whether the data plane may carry data between hosts; as in `attach_to_hosts`.

    Raises:
        ValueError: ``places`` is below 1, or a limit is not positive.

    Example:
        ```python
        from skipper.control.cluster.jobs import SlurmJob

        job = SlurmJob(2, partition="gpu", gpus_per_node=8, time_min=240, setup=["module load cuda"])
        # `with job:` submits the array, and job.hosts() waits for its agents, as with any Job.
        ```
    """

    def __init__(
        self,
        places: int,
        *,
        partition: str | None = None,
        account: str | None = None,
        time_min: int = 60,
        gpus_per_node: int | None = None,
        cpus_per_task: int | None = None,
        mem_gb: float | None = None,
        setup: Sequence[str] = (),
        parameters: Mapping[str, Any] | None = None,
        name: str = "skipper",
        folder: str | os.PathLike[str] = "skipper-jobs",
        interface: str | None = None,
        idle_timeout_s: float = 600.0,
        insecure: bool = False,
        address: str | None = None,
        data_plane: bool | None = None,
    ) -> None:
        if time_min <= 0 or idle_timeout_s <= 0:
            raise ValueError("time_min and idle_timeout_s are positive")
        asked = {
            "job_name": name,
            "partition": partition,
            "account": account,
            "time": time_min,
            "gpus_per_node": gpus_per_node,
            "cpus_per_task": cpus_per_task,
            "mem": None if mem_gb is None else f"{int(mem_gb * 1024)}MB",
            "setup": list(setup) or None,
            **(parameters or {}),
        }
        asked["additional_parameters"] = {"no_requeue": True, **asked.get("additional_parameters", {})}
        job_folder = JobFolder(folder)
        engine = SlurmEngine(
            job_folder,
            {key: value for key, value in asked.items() if value is not None},
            authority=None if insecure else Authority(job_folder, address),
            interface=interface,
            idle_timeout_s=idle_timeout_s,
        )
        super().__init__(engine, places, insecure=insecure, address=address, data_plane=data_plane)


class SlurmEngine:
    """Jobs of Slurm as places; see `Engine`. The authority signs the nodes' certificates; None: no TLS."""

    is_elastic = True

    def __init__(
        self,
        folder: JobFolder,
        parameters: Mapping[str, Any],
        *,
        authority: Authority | None,
        interface: str | None,
        idle_timeout_s: float,
    ) -> None:
        self._folder = folder
        self._parameters = parameters
        self._authority = authority
        self._interface = interface or ""
        self._idle_timeout_s = idle_timeout_s
        self._queue = _Queue()
        self._executor: SlurmExecutor | None = None
        self._jobs: list[str] = []
        self._replaced = 0
        self._announcements: list[Path] = []
        self._logs: dict[str, Path] = {}

    @property
    def secret_file(self) -> Path:
        """See `Engine`."""
        return self._folder.secret_file

    @property
    def certs(self) -> Path | None:
        """See `Engine`."""
        return None if self._authority is None else self._authority.certs

    def submit(self, places: int) -> None:
        """Submit an array of jobs."""
        self._executor = _executor(self._folder.logs, self._parameters)
        self._announcements = [self._folder.announcement(f"{rank}") for rank in range(places)]
        self._jobs = self._submit(self._announcements)

    def poll(self) -> Sequence[Place]:
        """Ask Slurm for the states of the jobs, and look at what agents have announced."""
        known = self._queue.look(self._jobs)
        return [
            _place(job_id, known[job_id], announcement)
            for job_id, announcement in zip(self._jobs, self._announcements, strict=True)
        ]

    def replace(self, rank: int) -> None:
        """Cancel the place's job, and submit another one."""
        scancel([self._jobs[rank]])
        self._replaced += 1
        self._announcements[rank] = self._folder.announcement(f"{rank}-{self._replaced}")
        [self._jobs[rank]] = self._submit([self._announcements[rank]])

    def log(self, rank: int) -> str:
        """The output of a place's task; only of its present job."""
        return read_log(self._logs[self._jobs[rank]])

    def cancel(self) -> None:
        """Cancel all jobs."""
        try:
            if self._jobs:
                scancel(self._jobs)
        finally:
            self._folder.close()

    def _submit(self, announcements: Sequence[Path]) -> list[str]:
        """Submit agents that announce themselves there; returns the ids of their jobs."""
        assert self._executor is not None  # `submit` comes first
        authority = "" if self._authority is None else str(self._authority.path)
        try:
            with self._executor.batch():
                # The task replaces submitit's process, so that only the agent gets signals of Slurm.
                jobs = [
                    self._executor.submit(
                        os.execv,
                        sys.executable,
                        [
                            sys.executable,
                            str(TASK),
                            str(announcement),
                            str(self.secret_file),
                            f"{self._idle_timeout_s:g}",
                            self._interface,
                            authority,
                        ],
                    )
                    for announcement in announcements
                ]
        except (RuntimeError, OSError) as error:
            raise JobError(f"Slurm rejected the job: {error}") from error
        self._logs.update((job.job_id, job.paths.stdout) for job in jobs)
        return [job.job_id for job in jobs]


def _executor(folder: Path, parameters: Mapping[str, Any]) -> SlurmExecutor:
    try:
        from submitit import SlurmExecutor
    except ImportError as error:
        raise JobLibraryError("a SlurmJob needs submitit: pip install 'skipper-mesh[slurm]'") from error
    try:
        executor = SlurmExecutor(folder)
    except RuntimeError as error:
        raise JobError(f"this machine belongs to no Slurm cluster: {error}") from error
    executor.update_parameters(stderr_to_stdout=True, array_parallelism=sys.maxsize, **parameters)
    return executor


def _place(job_id: str, known: Place, announcement: Path) -> Place:
    name = f"{job_id} on {known.name}" if known.name else job_id
    if known.state is PlaceState.RUNNING:
        return place_behind(announcement, name)
    return Place(known.state, name=name, reason=known.reason)


class _Queue:
    """The Slurm jobs that are the places of one Skipper job.

    It asks ``squeue`` as rarely as it can, since Slurm's controller serves the whole cluster.
    """

    def __init__(self) -> None:
        self._known: dict[str, Place] = {}
        self._looked_s = float("-inf")
        self._answered_s = float("-inf")

    def look(self, job_ids: Sequence[str]) -> dict[str, Place]:
        """The place of each job from Slurm; a running one is PENDING here until its agent listens.

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
        forgotten = Place(PlaceState.ENDED, reason="Slurm no longer knows it: it ended some time ago")
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
    """The place for a job state, see squeue(1), "JOB STATE CODES"."""
    if state in _ENDED:
        return Place(PlaceState.ENDED, name=node, reason=_ENDED[state])
    if state in _FAILED:
        return Place(PlaceState.FAILED, name=node, reason=f"{_FAILED[state]} ({state})")
    if state in _HAS_STARTED:
        return Place(PlaceState.RUNNING, name=node)
    return Place(PlaceState.PENDING, name=node, reason=f"{state}: {reason}")


def scancel(job_ids: Sequence[str]) -> None:
    """Cancel the jobs that have not ended.

    Raises:
        JobError: the controller does not answer, or refuses.
    """
    try:
        slurm("scancel", "--quiet", *job_ids)
    except JobError as error:
        if _UNKNOWN not in str(error):
            raise


def slurm(*command: str) -> str:
    """Run a program of Slurm; returns its output.

    Raises:
        JobError: it does not exist, fails, or does not answer.
    """
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except FileNotFoundError:
        raise JobError(f"there is no {command[0]} here: this machine belongs to no Slurm cluster") from None
    except subprocess.TimeoutExpired:
        raise JobError(f"{command[0]} does not answer within {_COMMAND_S:g} s") from None
    if done.returncode != 0:
        raise JobError(f"{command[0]} failed: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout
