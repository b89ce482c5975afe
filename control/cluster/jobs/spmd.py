"""`SpmdJob`: the processes of ``torchrun`` as one mesh, which the script on rank 0 controls."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

from skipper.control.api.join import join, serve_job
from skipper.control.api.mesh import ProcMesh, get_or_spawn_controller
from skipper.control.cluster.hosts.job_gate import GateAddress, JobGate, enter_by_gate
from skipper.control.cluster.jobs.rank_registry import REGISTRY, RankEntry, RankRegistry, extent_of
from skipper.control.model.errors import (
    AlreadyInJobError,
    ControlError,
    DeadlineError,
    HostUnreachableError,
    JobNotFoundError,
    RemoteHostError,
    RendezvousError,
    SupervisionError,
    TorchrunError,
)
from skipper.control.model.future import Future, Promise
from skipper.control.model.shape import Shape
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.process import Process

if TYPE_CHECKING:
    from skipper.control.api.views import ActorMesh

_log = logging.getLogger("skipper.control")

PORT = 7432
"""The port on which rank 0 listens by default."""

MEET_TIMEOUT_S = 300.0
"""How long ranks wait for each other, as ``torchrun`` itself does: some may still be importing."""

FOLLOW_S = 2.0
"""How long a process that ends only because another one has failed waits, so that ``torchrun`` sees that one first and
ends this one by itself: it reports the failure that it sees first."""

_KNOCK_S = 0.05
_CONNECT_S = 10.0
_MESH = "ranks"


@dataclass(frozen=True, slots=True)
class TorchrunRank:
    """One rank of a run of ``torchrun``.

    Attributes:
        rank: among all.
        world_size: how many there are.
        local_rank: among those of its node.
        local_world_size: how many there are on its node.
        master_addr: the node of rank 0, by a name or an IP.
        master_port: the port of ``torch.distributed`` there.
        run_id: what all ranks of a run have in common.
        restart: how often the ranks of this run have been restarted.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    run_id: str = ""
    restart: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> TorchrunRank:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

        Raises:
            TorchrunError: one of them is missing, or is not a number, or they contradict each other.
        """
        launch = cls(
            rank=_number(environment, "RANK"),
            world_size=_number(environment, "WORLD_SIZE"),
            local_rank=_number(environment, "LOCAL_RANK"),
            local_world_size=_number(environment, "LOCAL_WORLD_SIZE"),
            master_addr=_text(environment, "MASTER_ADDR"),
            master_port=_number(environment, "MASTER_PORT"),
            run_id=environment.get("TORCHELASTIC_RUN_ID", ""),
            restart=_number({"TORCHELASTIC_RESTART_COUNT": "0", **environment}, "TORCHELASTIC_RESTART_COUNT"),
        )
        fits = launch.rank < launch.world_size and launch.local_rank < launch.local_world_size <= launch.world_size
        if not fits:
            raise TorchrunError(f"RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE do not fit together: {launch}")
        return launch

    @property
    def has_one_node(self) -> bool:
        """Whether all ranks are on the same node."""
        return self.local_world_size == self.world_size

    @property
    def name(self) -> str:
        """A name that only these ranks have in common: after a restart they have another."""
        parts = (self.run_id, self.restart, self.master_addr, self.master_port, self.world_size)
        digest = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
        return f"torchrun-{digest[:16]}"


class SpmdJob:
    """The ranks of a run of ``torchrun`` as processes of one job; a context manager.

    The script is the same on all ranks. Rank 0 runs the body of the ``with`` statement, and controls the others. The
    others stay in it as processes on which actors run, and end by ``sys.exit(0)`` at its end, so that they do not run
    the code after it. If rank 0 fails they end with status 1. The death of a rank is a failure of the meshes on it, as
    for any process; ``torchrun`` then ends all the others, and restarts them if it is configured so: that is a new job.

    With all ranks on one node, no argument is needed. The ranks of several nodes connect to rank 0, and prove that they
    know a secret, which is in a file on every node.

    Args:
        address: where rank 0 listens, ``tcp://HOST:PORT``, the same on all ranks; None: at MASTER_ADDR and `PORT`. Not
            used with one node, like all others except ``timeout``.
        secret_file: the file with the secret (``skipper host secret`` makes one); None: the file ``secret`` in
            ``certs``.
        certs: a folder with the certificates of this node (``skipper certs issue`` makes one), for TLS.
        insecure: use no TLS between nodes. Anyone on the network path can then run code in the job.
        data_plane: whether the data plane, which encrypts nothing, may carry data between nodes; None: only if there is
            no TLS.
        timeout: how long ranks wait for each other, in seconds.

    Attributes:
        launch: the rank, as ``torchrun`` describes it in the environment.

    Raises:
        TorchrunError: this process is not a rank of ``torchrun``.
        InsecureHostError: (a `ValueError`) there are several nodes, no certificates, and ``insecure`` is not set.
        CertificateError: (a `ValueError`) ``certs`` is not valid for TLS.
        UnsafeFileError: others can read the secret.
        ValueError: there are several nodes and no secret, or the address is not valid.

    Example:
        ```python
        import os

        from skipper.control import Actor, endpoint
        from skipper.control.cluster.jobs import SpmdJob

        for name in ("RANK", "LOCAL_RANK"):
            os.environ.setdefault(name, "0")  # torchrun sets these
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.setdefault(name, "1")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")

        class Trainer(Actor):
            @endpoint
            def rank(self) -> str:
                return os.environ["RANK"]

        with SpmdJob() as job:  # rank 0 runs the body; the others run actors
            print(job.procs().spawn("trainers", Trainer).rank.call().get(timeout=60))  # ['0']
        ```
    """

    def __init__(
        self,
        *,
        address: str | None = None,
        secret_file: str | os.PathLike[str] | None = None,
        certs: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        data_plane: bool | None = None,
        timeout: float = MEET_TIMEOUT_S,
    ) -> None:
        self.launch = TorchrunRank.of(os.environ)
        self._gate: GateAddress | None = None
        if not self.launch.has_one_node:
            address = address or f"tcp://{self.launch.master_addr}:{PORT}"
            self._gate = GateAddress.of(address, secret_file, certs, insecure=insecure, data_plane=data_plane)
        self._timeout = timeout
        self._procs: ProcMesh | None = None
        self._registry: ActorMesh[RankRegistry] | None = None
        self._was_entered = False
        self._is_ending = False
        self._is_well = False
        self._last_loss = -math.inf
        self._ends: list[Future[str]] = []

    def procs(self) -> ProcMesh:
        """The processes of all ranks, along the axes ``hosts`` and ``gpus``, in the order of ranks.

        Rank 0 is among them: its actors run on threads of their own next to the script, so that each GPU has one
        process. If the nodes have different numbers of ranks there is one axis, ``ranks``. Stopping the mesh ends the
        other ranks.

        Raises:
            TorchrunError: it was called outside of the ``with`` statement.
        """
        if self._procs is None:
            raise TorchrunError("call procs() inside the with statement: with SpmdJob() as job: job.procs()")
        return self._procs

    def __enter__(self) -> Self:
        if self._was_entered:
            raise TorchrunError("the ranks left when the with statement ended: run the script again under torchrun")
        self._was_entered = True
        if self.launch.rank:
            self._serve()
        self._gather()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_well = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        if isinstance(error, ControlError):  # now: the launcher may end this rank before Python reports the error
            _log.error("rank %d ends the job: %s", self.launch.rank, error)
        runtime.shutdown()
        self._procs = None

    # On rank 0

    def _gather(self) -> None:
        """Wait until all ranks are here."""
        process = runtime.current()
        if process.root.id != process.me.id:
            raise AlreadyInJobError(f"rank 0 already belongs to the job of another process, as {process.me.name!r}")
        try:
            close = self._open(process)
            try:
                entries = self._wait_for_all(process)
            finally:
                close()
            self._procs = self._mesh_of(process, entries)
        except BaseException:
            self._is_ending = True
            if self._registry is not None:
                self._registry.dismiss.call_one(False)
            runtime.shutdown()
            raise

    def _open(self, process: Process) -> Callable[[], None]:
        """Let the other ranks join; returns a function that stops that."""
        self._registry = get_or_spawn_controller(REGISTRY, RankRegistry, self.launch.world_size).get(self._timeout)
        if self.launch.world_size == 1:
            return lambda: None
        if self._gate is not None:
            return JobGate(process, self._gate, self.launch.name).close
        return serve_job(self.launch.name).close

    def _wait_for_all(self, process: Process) -> Sequence[RankEntry]:
        assert self._registry is not None  # `_open` has found it
        here = self._registry.wait_for_all.call_one(self._timeout).get(self._timeout + _CONNECT_S)
        here[0] = RankEntry(process.me, self.launch.local_world_size)
        missing = sorted(set(range(self.launch.world_size)) - set(here))
        if missing:
            raise RendezvousError(
                f"ranks {missing} of {self.launch.world_size} have not joined the job within {self._timeout:g} s"
            )
        return [here[rank] for rank in sorted(here)]

    def _mesh_of(self, process: Process, entries: Sequence[RankEntry]) -> ProcMesh:
        everyone = tuple(entry.process for entry in entries)
        extent = extent_of([entry.local_world_size for entry in entries])
        mesh = ProcMesh(secrets.randbits(63), _MESH, everyone, extent, Shape.whole(extent), process.me)
        assert process.root_actor is not None  # this is the script
        process.root_actor.own(mesh)
        process.remote_launch.adopt(mesh.uid, self._dismiss)
        self._ends = [end for rank in everyone[1:] if (end := process.members.end_of(rank.id)) is not None]
        for end in self._ends:
            end.add_done_callback(lambda _: self._lost())
        process.ending.before.append(self._end)
        return mesh

    def _lost(self) -> None:
        if not self._is_ending:
            self._last_loss = time.monotonic()

    def _end(self) -> None:
        """End the run, before the job ends."""
        time.sleep(max(self._last_loss + FOLLOW_S - time.monotonic(), 0))
        self._is_ending = True

    def _dismiss(self) -> Future[None]:
        """Let the other ranks leave, with status 0 even before the end of the job. The future ends with the last."""
        is_well = self._is_well or not self._is_ending
        self._is_ending = True
        assert self._registry is not None  # `_open` has found it
        self._registry.dismiss.call_one(is_well)
        return all_over(self._ends)

    # On the other ranks

    def _serve(self) -> NoReturn:
        """Serve as a process of rank 0's job until that job is over."""
        deadline = time.monotonic() + self._timeout
        process = self._join(deadline)
        why = f"rank {self.launch.rank} ends because rank 0 has failed"
        try:
            registry = get_or_spawn_controller(REGISTRY, RankRegistry, self.launch.world_size).get(
                deadline - time.monotonic()
            )
            is_well = registry.stay.call_one(
                self.launch.rank, RankEntry(process.me, self.launch.local_world_size)
            ).get()
        except SupervisionError as error:
            is_well, why = False, f"rank {self.launch.rank} ends because rank 0 is gone: {error}"
        runtime.shutdown()
        if is_well:
            sys.exit(0)
        time.sleep(FOLLOW_S)
        sys.exit(why)

    def _join(self, deadline: float) -> Process:
        """Join the job of rank 0 as soon as it exists."""
        if runtime.is_running():
            raise AlreadyInJobError(
                "this process has already started its own job: enter the SpmdJob before the first spawn"
            )
        while True:
            try:
                return self._try_to_join()
            except (JobNotFoundError, RemoteHostError, HostUnreachableError, DeadlineError) as error:
                if time.monotonic() > deadline:
                    raise RendezvousError(f"rank 0 could not be reached within {self._timeout:g} s: {error}") from error
            time.sleep(_KNOCK_S)

    def _try_to_join(self) -> Process:
        name = f"rank {self.launch.rank}"
        if self._gate is not None:
            return enter_by_gate(self._gate, self.launch.name, name, timeout=_CONNECT_S)
        join(self.launch.name, name=name, timeout=_CONNECT_S)
        return runtime.current()

    def __repr__(self) -> str:
        return f"<SpmdJob rank {self.launch.rank} of {self.launch.world_size}>"


def _text(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name)
    if not value:
        raise TorchrunError(f"{name} is not set: start the script with torchrun, or set what torchrun sets")
    return value


def _number(environment: Mapping[str, str], name: str) -> int:
    value = _text(environment, name)
    if not value.isdecimal():
        raise TorchrunError(f"{name} is a number under torchrun, not {value!r}")
    return int(value)


def all_over(ends: Sequence[Future[str]]) -> Future[None]:
    """A future that ends with the last of these."""
    future: Promise[None] = Promise()
    left = itertools.count(len(ends) - 1, -1)

    def ended(_: Future[str]) -> None:
        if next(left) == 0:
            future.set_result(None)

    for end in ends:
        end.add_done_callback(ended)
    if not ends:
        future.set_result(None)
    return future
