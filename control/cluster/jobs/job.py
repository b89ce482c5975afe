"""`Job`: hosts that an engine places, and that are attached to the job of this script."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from skipper.control.api.mesh import HostMesh, joined
from skipper.control.cluster.hosts import attach_to_hosts
from skipper.control.cluster.jobs.engine import Engine, Place, PlaceState
from skipper.control.model.errors import (
    ControlError,
    DeadlineError,
    HostError,
    JobError,
    JobFailedError,
    NotElasticError,
)
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.procs.ending import Ending
from skipper.control.wire import addresses

HOSTS_TIMEOUT_S = 600.0
_FIRST_LOOK_S = 0.05
_LOOK_S = 2.0
"""The longest pause between two polls of the engine; the pauses grow, since queues can be long."""
ATTACH_S = 10.0
"""The least time for attaching a host whose agent listens, even if the time-out leaves less."""
_STOP_S = 30.0
_REASON_S = 1.0
_TAIL_NLINES = 30

_log = logging.getLogger("skipper.control.cluster.jobs")

_OVER = (PlaceState.FAILED, PlaceState.ENDED)
_WORST_FIRST = (*_OVER, PlaceState.PENDING, PlaceState.RUNNING)


class Job:
    """Hosts that an engine places: it starts an agent on each, which the script attaches. A context manager.

    The job ends with ``cancel``, with the ``with`` statement, with `shutdown`, or with the script; if the script is
    killed, its agents end by themselves.

    Args:
        engine: the engine that places them.
        places: how many.
        insecure: use no TLS to other machines; this and the next two as in `attach_to_hosts`.
        address: the IP at which the hosts reach this script.
        data_plane: whether the data plane may carry data between hosts.

    Raises:
        ValueError: ``places`` is below 1.

    Example:
        ```python
        from skipper.control.cluster.jobs import Job, LocalJob, Place, PlaceState

        job: Job = LocalJob(2)  # or SlurmJob, RayJob, KubernetesJob, LoginJob
        with job:
            print(job.hosts().extent)  # {'hosts': 2}
            places: list[Place] = list(job.places())
            print(all(place.state is PlaceState.RUNNING for place in places))  # True
        ```
    """

    def __init__(
        self,
        engine: Engine,
        places: int,
        *,
        insecure: bool = False,
        address: str | None = None,
        data_plane: bool | None = None,
    ) -> None:
        if places < 1:
            raise ValueError(f"a job has at least one place, not {places}")
        self.engine = engine
        self.size = places
        self.insecure = insecure
        self.address = address
        self.data_plane = data_plane
        self._is_submitted = False
        self._is_over = False
        self._ending: Ending | None = None
        self._attached: dict[int, HostMesh] = {}
        self._mesh: HostMesh | None = None

    def start(self) -> Self:
        """Ask the engine for the places; idempotent. Returns when it has accepted the job.

        Raises:
            JobError: the engine refuses, or cannot be reached, or the job was cancelled.
        """
        if self._is_over:
            raise JobError("this job has ended: make another one")
        if not self._is_submitted:
            self._ending = runtime.current().ending
            self._ending.after.append(self._end)
            self._is_submitted = True
            try:
                self.engine.submit(self.size)
            except BaseException:
                with contextlib.suppress(JobError):  # the first error is the one to report
                    self.cancel()
                self._is_submitted = False
                raise
        return self

    def hosts(self, *, timeout: float = HOSTS_TIMEOUT_S) -> HostMesh:
        """Wait for all hosts and return them; later calls return the same mesh.

        Each host is attached as soon as it is up, so that its agent does not end as idle while others are still
        starting. After a time-out you can call it again.

        Args:
            timeout: in seconds, for all places to come up.

        Returns:
            A mesh with the axis ``hosts``, in rank order.

        Raises:
            JobFailedError: a place has failed or ended.
            DeadlineError: (a `TimeoutError`) not all are there in time; the message says what the others wait for.
            JobError: the engine refuses, or cannot be reached.
            HostError: a host cannot be attached, as in `attach_to_hosts`.
        """
        self.start()
        if self._mesh is None:
            deadline = time.monotonic() + timeout
            self._bring_up(deadline)
            while gone := _lost(self._those_attached()):
                for rank in gone:
                    del self._attached[rank]
                self._bring_up(deadline)
            self._mesh = self._those_attached()
        return self._mesh

    def replace(self, *, timeout: float = HOSTS_TIMEOUT_S) -> HostMesh:
        """Replace the lost hosts: those whose agents still answer are attached again, others come from the engine.

        What was spawned on a lost host stays lost: spawn again on the returned mesh.

        Args:
            timeout: in seconds, for all new places to come up.

        Returns:
            The hosts of the job, new ones in the places of the lost ones.

        Raises:
            NotElasticError: the engine cannot replace a lost place.
            JobFailedError: a new place has failed, too; you may try again.
            DeadlineError: (a `TimeoutError`) not all are there in time; another call continues.
            JobError: the engine refuses, or cannot be reached.
        """
        before = self.hosts(timeout=timeout)
        deadline = time.monotonic() + timeout
        places = self.places()
        over = {rank for rank, place in enumerate(places) if place.state in _OVER}
        gone = sorted(over.union(_lost(before)))
        if not gone:
            return before
        for rank in gone:
            self._attached.pop(rank, None)
        try:
            for rank in gone:  # a pending place, or one that is elsewhere now, was requested before
                same = _is_at(places[rank], before.names[rank])
                if rank in over or (same and not self._reattach(rank, places[rank])):
                    self._replace(rank)
            self._bring_up(deadline)
        finally:
            self._mesh = before.with_successors({rank: self._attached[rank] for rank in gone if rank in self._attached})
        return self._mesh

    def places(self) -> Sequence[Place]:
        """The state of each place, in rank order.

        Raises:
            JobError: the job has not been started, or the engine cannot be reached.
        """
        if not self._is_submitted:
            raise JobError("the job has not been started")
        return self.engine.poll()

    def state(self) -> PlaceState:
        """The state of the job: the worst state among its places.

        Raises:
            JobError: as for `places`.
        """
        states = {place.state for place in self.places()}
        return next(state for state in _WORST_FIRST if state in states)

    def logs(self, rank: int | None = None) -> str:
        """The output so far of the agent of a place, and of the processes that it has started.

        Args:
            rank: the place; None: all of them, each line with its rank in front.

        Raises:
            IndexError: there is no such place.
            JobError: the job has not been started, or the engine cannot be reached.
        """
        if rank is not None and not 0 <= rank < self.size:
            raise IndexError(f"the job has {self.size} places, and none of rank {rank}")
        if not self._is_submitted:
            raise JobError("the job has not been started")
        if rank is not None:
            return self.engine.log(rank)
        lines = [(rank, line) for rank in range(self.size) for line in self.engine.log(rank).splitlines()]
        return "".join(f"[{rank}] {line}\n" for rank, line in lines)

    def cancel(self) -> None:
        """Stop the script's processes on the hosts, and end the job; idempotent.

        Raises:
            JobError: the engine cannot be reached. What is left ends by itself.
        """
        if not self._is_submitted or self._is_over:
            self._is_over = True
            return
        self._is_over = True
        if self._ending is not None and self._end in self._ending.after:
            self._ending.after.remove(self._end)
        try:
            self._let_go()
        finally:
            self.engine.cancel()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    # How hosts come and go

    def _bring_up(self, deadline: float) -> None:
        """Attach each place that is not attached, as soon as it runs."""
        pause = _FIRST_LOOK_S
        while missing := [rank for rank in range(self.size) if rank not in self._attached]:
            places = self.engine.poll()
            for rank in missing:
                self._check(rank, places[rank])
            ready = {rank: places[rank] for rank in missing if places[rank].state is PlaceState.RUNNING}
            left = deadline - time.monotonic()
            if ready:
                self._attach(ready, max(left, ATTACH_S))
            elif left <= 0:
                raise DeadlineError(f"not all places of the job were ready in time: {_described(places, missing)}")
            else:
                time.sleep(min(pause, left))
                pause = min(pause * 1.5, _LOOK_S)

    def _attach(self, places: Mapping[int, Place], timeout: float) -> None:
        found = [place.address for place in places.values() if place.address is not None]
        try:
            mesh = attach_to_hosts(
                found,
                secret_file=self.engine.secret_file,
                certs=self.engine.certs,
                insecure=self.insecure,
                address=self.address,
                data_plane=self.data_plane,
                timeout=timeout,
            )
        except HostError:
            now = self.engine.poll()
            for rank in places:  # if the place has failed by now, that says more than that it does not answer
                self._check(rank, now[rank])
            raise
        self._attached.update((rank, mesh.slice(hosts=slice(at, at + 1))) for at, rank in enumerate(places))

    def _check(self, rank: int, place: Place) -> None:
        if place.state in _OVER:
            reason = place.reason or "its agent has ended"
            raise JobFailedError(rank, f"{place.name}: {reason}" if place.name else reason, self._tail(rank))

    def _tail(self, rank: int) -> str:
        try:
            return "\n".join(self.engine.log(rank).splitlines()[-_TAIL_NLINES:])
        except JobError as error:
            return f"(cannot read the log: {error})"

    def _reattach(self, rank: int, place: Place) -> bool:
        """Whether the agent of a lost host still answers, and the host is attached again."""
        try:
            # A connection shows at once that no process listens; attaching would try until its time-out.
            socket.create_connection(addresses.parse(place.address or ""), timeout=ATTACH_S).close()
            self._attach({rank: place}, ATTACH_S)
        except (OSError, JobFailedError):
            return False
        return True

    def _replace(self, rank: int) -> None:
        if not self.engine.is_elastic:
            raise NotElasticError(
                f"place {rank} of the job is lost ({self._reason(rank)}), and its engine cannot replace it"
            )
        self.engine.replace(rank)

    def _reason(self, rank: int) -> str:
        """Why a place is lost; its engine may know that a moment later than this process knows of the loss."""
        until = time.monotonic() + _REASON_S
        while not (reason := self.engine.poll()[rank].reason) and time.monotonic() < until:
            time.sleep(_FIRST_LOOK_S)
        return reason or "its agent does not answer"

    def _those_attached(self) -> HostMesh:
        return joined([self._attached[rank] for rank in range(self.size)])

    def _end(self) -> None:
        """End the job with the script, with `shutdown`, or after a failure that nobody handled."""
        self._is_over = True
        try:
            self.engine.cancel()
        except JobError as error:
            _log.warning(
                "the places of the job could not be cancelled and will end when their agents are idle: %s", error
            )

    def _let_go(self) -> None:
        """Stop the hosts in good order, so that the script does not see the end of the agents as a failure."""
        attached = list(self._attached.values())
        if not attached or not runtime.is_running():
            return
        try:
            joined(attached).stop().get(timeout=_STOP_S)
        except ControlError:
            return  # the engine ends what does not stop


def _lost(hosts: HostMesh) -> tuple[int, ...]:
    """Which hosts are lost. Unreachable ones are known after the heartbeat's bound, others at once."""
    return hosts.lost(timeout=runtime.current().settings.heartbeat_s + ATTACH_S)


def _is_at(place: Place, name: str) -> bool:
    """Whether the agent of a place listens where the host with this name was attached."""
    if place.state is not PlaceState.RUNNING or place.address is None:
        return False
    try:
        return addresses.at(*addresses.parse(place.address)) == name
    except ValueError:
        return False  # the name cannot be resolved any more


def _described(places: Sequence[Place], ranks: Iterable[int]) -> str:
    found = [(rank, places[rank]) for rank in ranks]
    return "; ".join(f"{rank} is {place.state}{f' ({place.reason})' if place.reason else ''}" for rank, place in found)
