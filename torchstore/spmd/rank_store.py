"""`initialize_spmd`: a store for the ranks of an SPMD job, which all make the same calls, under any launcher.

Rank 0 becomes the root of a control job and starts the store in it; the others join that job.
`torchstore.spmd.ranks` finds out which rank a process is, `torchstore.spmd.launch` finds the job, and in
`torchstore.spmd.rendezvous` the ranks meet.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from skipper import control
from skipper.control import (
    ActorMesh,
    ControlError,
    Extent,
    HostError,
    ProcMesh,
    Shape,
    SupervisionError,
    get_or_spawn_controller,
    this_proc,
)
from skipper.control.cluster.hosts.companion import Companion
from skipper.control.runtime import current_runtime as runtime
from skipper.control.runtime.join_file import this_network
from skipper.torchstore import api
from skipper.torchstore.clients.membership import dismiss, enrol
from skipper.torchstore.clients.registry import DEFAULT_STORE_NAME, controller_of, reset_client
from skipper.torchstore.clients.remote import DEFAULT_TIMEOUT_S
from skipper.torchstore.errors import StoreError, StoreRendezvousError, StoreTimeoutError, StrategyError
from skipper.torchstore.protocol.strategy import HostStrategy, LocalRankStrategy, TorchStoreStrategy
from skipper.torchstore.spmd.launch import EnteredJob, OpenedJob, Trust, enter_job, open_job
from skipper.torchstore.spmd.rank_volumes import HostVolumes, RankVolumes
from skipper.torchstore.spmd.ranks import Launch, RankPlace, SPMDEnv, note_place
from skipper.torchstore.spmd.rendezvous import Arrival, Rendezvous
from skipper.torchstore.support.coroutines import public
from skipper.torchstore.support.deadlines import ask
from skipper.torchstore.support.process import this_process
from skipper.torchstore.tensors.certifying import Certify, check_certify

_GRACE_S = 5.0
"""The rendezvous' own deadline gives the better message, so it must come first."""

_sessions: dict[str, _Session] = {}
_beginning: set[str] = set()
_has_joined = False
"""Whether this process is in a job because a store here has joined it."""


@dataclass(slots=True)
class _Session:
    """A store that all ranks have initialized together in a round of the rendezvous; ``companion`` hosts a volume."""

    store_name: str
    place: RankPlace
    rendezvous: ActorMesh[Rendezvous]
    number: int
    companion: Companion | None

    async def shutdown(self, timeout: float) -> None:
        """Rank 0 shuts the store down when all have finished with it; the others wait until it has.

        Raises:
            StoreTimeoutError: Rank 0: some ranks are still there, and the message names them; the store is shut down
                all the same. The others: rank 0 has not shut it down; this rank has left it all the same.
            SupervisionError: (control's) rank 0 has died.
        """
        deadline = time.monotonic() + timeout
        _sessions.pop(self.store_name, None)
        note_place(self.store_name, None)
        if not _sessions:
            dismiss()
        try:
            if self.place.rank == 0:
                await self._shut_down(deadline)
            else:
                reset_client(self.store_name)
                rank = self.place.rank
                left = _left(deadline)
                await ask(self.rendezvous.leave.call_one(self.number, rank, left), left + _GRACE_S)
                with suppress(ControlError, StoreError):  # rank 0 may be gone by now
                    await ask(self.rendezvous.inform.call_one(rank), _GRACE_S)
        finally:
            if self.companion is not None:
                await asyncio.to_thread(self.companion.close)
            await asyncio.to_thread(_leave_if_alone)

    async def _shut_down(self, deadline: float) -> None:
        left = _left(deadline)
        still_there = await ask(self.rendezvous.wait_for_others.call_one(left), left + _GRACE_S)
        try:
            await api.teardown(self.store_name, max(_left(deadline), DEFAULT_TIMEOUT_S))
        finally:
            await ask(self.rendezvous.close.call_one(), DEFAULT_TIMEOUT_S)
        if still_there:
            who = ", ".join(f"rank {rank}" for rank in still_there)
            raise StoreTimeoutError(f"{who} did not shut down the store {self.store_name!r}; rank 0 has shut it down")


@public
async def initialize_spmd(
    strategy: TorchStoreStrategy | None = None,
    store_name: str = DEFAULT_STORE_NAME,
    *,
    env: SPMDEnv | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    rendezvous_timeout: timedelta = timedelta(seconds=120),
    address: str | None = None,
    secret_file: str | os.PathLike[str] | None = None,
    certs: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    data_plane: bool | None = None,
    transport: str | None = None,
    python_exe: str | None = None,
    monarch_port: int | None = None,
    ssh_args: Sequence[str] = (),
    keep_versions: int = 1,
    volume_nbytes: int | None = None,
    checksum: bool = False,
    certify: Certify = False,
) -> None:
    """Start a store from within an SPMD job: every rank calls it, and may use the store when it returns.

    The ranks may have been started by torchrun, `torch.multiprocessing.spawn`, mpirun, srun, Ray or any launcher that
    sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; if ``torch.distributed`` is initialized, none has to be set.

    The volumes run in processes of their own, one for each rank with `LocalRankStrategy` and one for each host with
    `HostStrategy`. They and the store's controller live as long as rank 0; those on another host end with the ranks
    there. Every rank calls `shutdown`: rank 0 shuts the store down when all have called it or ended.

    Ranks of one host need nothing else. Ranks of several hosts prove that they know a secret, and connect by TLS or, if
    the whole network is trusted, without it.

    Args:
        strategy: `LocalRankStrategy` or `HostStrategy`.
        store_name: Stores of different names are independent.
        env: Which rank this is; None: as ``rank``, ``torch.distributed`` or the environment say.
        rank: Which rank this is, together with ``world_size``.
        world_size: How many ranks there are.
        rendezvous_timeout: How long the ranks wait for each other.
        address: Several hosts: where rank 0 listens, ``tcp://HOST:PORT``, the same on all ranks; None: at MASTER_ADDR,
            on a free port if ``torch.distributed`` or torchrun have a store to publish it, else on MASTER_PORT.
        secret_file: Several hosts: the file with the secret (``skipper host secret`` makes one); None: the file
            ``secret`` in ``certs``, or without certificates what SKIPPER_SECRET_FILE names.
        certs: Several hosts: a folder with this host's certificates, for TLS: of the role script on rank 0's host, of
            the role host on the others; None: what SKIPPER_CERTS names.
        insecure: Use no TLS between hosts. Anyone on the network path can then run code in the job.
        data_plane: Whether the data plane, which encrypts nothing, may carry data between hosts; None: only if there is
            no TLS. Without it, only small values reach other hosts.
        transport: Accepted, like the next three, for callers of Meta's torchstore; no process is started by them here.
        python_exe: See ``transport``.
        monarch_port: See ``transport``.
        ssh_args: See ``transport``.
        keep_versions: See `initialize`; the value of rank 0 is used.
        volume_nbytes: See `initialize`; the value of rank 0 is used.
        checksum: See `initialize`; the value of rank 0 is used.
        certify: See `initialize`; the value of rank 0 is used.

    Raises:
        StrategyError: (a `ValueError`) no strategy, or another one; or this process has initialized the store already.
        RankEnvironmentError: (a `ValueError` and a `StoreRendezvousError`) nothing says which rank this is, or a
            variable is missing or not a number; the message names it.
        StoreRendezvousError: Another rank has failed, with the same message; or rank 0 is on another host and this rank
            has no secret.
        StoreTimeoutError: (a `TimeoutError`) not all ranks arrived in time; the message names those that did not.
        InsecureHostError: (control's, a `ValueError`) several hosts, no certificates, and ``insecure`` is not set.
        CertificateError: (control's, a `ValueError`) ``certs`` is not valid for TLS.
        UnsafeFileError: (control's) others can read the secret.
        AuthenticationError: (control's) rank 0 has another secret.
        AlreadyInJobError: (control's) this process is part of another job.
        WireError: (control's) rank 0 cannot listen on its address.
    """
    if not isinstance(strategy, HostStrategy | LocalRankStrategy):
        raise StrategyError("initialize_spmd needs HostStrategy or LocalRankStrategy: strategy=LocalRankStrategy()")
    if store_name in _sessions or store_name in _beginning:
        raise StrategyError(f"this process has already initialized the store {store_name!r}; shut it down first")
    check_certify(certify)
    deadline = time.monotonic() + rendezvous_timeout.total_seconds()
    launch = Launch.find(env, rank=rank, world_size=world_size)
    trust = Trust(address, secret_file, certs, insecure, data_plane).completed()
    beginning = _Beginning(launch, trust, store_name, _of_ranks(strategy, store_name), deadline)
    _beginning.add(store_name)
    try:
        session = await beginning.run(
            keep_versions=keep_versions, volume_nbytes=volume_nbytes, checksum=checksum, certify=certify
        )
    except BaseException as error:
        await beginning.undo(error)
        raise
    finally:
        _beginning.discard(store_name)
    if not _sessions:
        enrol(f"spmd {store_name} {session.number}", session.place.rank, session.place.world_size)
    _sessions[store_name] = session
    note_place(store_name, session.place)
    api.shut_down_together[store_name] = session.shutdown
    last = runtime.current().ending.after
    if _forget_all not in last:
        last.append(_forget_all)


initialize = initialize_spmd
"""The name that it has in this module in Meta's torchstore."""


class _Beginning:
    """The steps of one rank until the store exists, and their cleanup after a failure."""

    def __init__(
        self, launch: Launch, trust: Trust, store_name: str, strategy: TorchStoreStrategy, deadline: float
    ) -> None:
        self._launch = launch
        self._trust = trust
        self._store_name = store_name
        self._strategy = strategy
        self._deadline = deadline
        self._way: OpenedJob | EnteredJob | None = None
        self._rendezvous: ActorMesh[Rendezvous] | None = None
        self._companion: Companion | None = None
        self._has_started = False
        self._gave_up = threading.Event()

    async def run(self, **settings: Any) -> _Session:
        """Meet the others, and start the store or wait for it."""
        rank = self._launch.rank
        try:
            rendezvous = await self._meet()
            arrival = arrival_of(rank)
            place, number = await ask(rendezvous.arrive.call_one(arrival, self._left()), self._left() + _GRACE_S)
            if rank == 0:
                await self._bring(rendezvous, place)
                await self._start(rendezvous, place, settings)
            else:
                await self._bring_and_wait(rendezvous, place)
            controller = await controller_of(self._store_name, self._left())
            await ask(controller.info.call_one(this_process(), this_proc()), self._left())
            await ask(rendezvous.ready.call_one(rank, self._left()), self._left() + _GRACE_S)
        except SupervisionError as error:
            raise StoreRendezvousError(f"rank 0 is gone, or a process that it started: {error}") from error
        return _Session(self._store_name, place, rendezvous, number, self._companion)

    async def undo(self, error: BaseException) -> None:
        """Tell the others, and clean up."""
        self._gave_up.set()
        if self._rendezvous is not None:
            reason, is_timeout = f"{type(error).__name__}: {error}", isinstance(error, TimeoutError)
            with suppress(StoreError, ControlError):
                await ask(self._rendezvous.fail.call_one(self._launch.rank, reason, is_timeout), _GRACE_S)
        if isinstance(self._way, OpenedJob):
            await asyncio.to_thread(self._way.close)
        if self._has_started:
            with suppress(StoreError, ControlError):
                await api.teardown(self._store_name, DEFAULT_TIMEOUT_S)
        if self._companion is not None:
            await asyncio.to_thread(self._companion.close)
        await asyncio.to_thread(_leave_if_alone, but=self._store_name)

    async def _meet(self) -> ActorMesh[Rendezvous]:
        """Open the job, or join it; then find the rendezvous."""
        global _has_joined
        launch, trust, name, deadline = self._launch, self._trust, self._store_name, self._deadline
        if launch.rank:
            is_member = _has_joined and runtime.is_running()  # the script may have left the job by itself
            self._way = way = await asyncio.to_thread(
                enter_job, launch, trust, name, deadline, is_member=is_member, gave_up=self._gave_up
            )
            _has_joined = _has_joined or way.has_joined
        self._rendezvous = rendezvous = await ask(
            get_or_spawn_controller(f"torchstore/spmd/{name}", Rendezvous), self._left()
        )
        if launch.rank == 0:
            await ask(rendezvous.open.call_one(launch.world_size), self._left())
            self._way = await asyncio.to_thread(open_job, launch, trust, name, deadline)
        return rendezvous

    async def _bring_and_wait(self, rendezvous: ActorMesh[Rendezvous], place: RankPlace) -> None:
        """Bring this rank's process for a volume, if any, and wait for the store; both end when rank 0 ends."""
        left = self._left()
        waiting = asyncio.ensure_future(ask(rendezvous.wait_for_start.call_one(left), left + _GRACE_S))
        bringing = asyncio.ensure_future(self._bring(rendezvous, place))
        try:
            await asyncio.wait({waiting, bringing}, return_when=asyncio.FIRST_COMPLETED)
            if not bringing.done():  # the store waits for these processes: the other ranks have failed
                self._gave_up.set()
                if self._companion is not None:
                    self._companion.give_up()
            with suppress(HostError):  # the death of rank 0 explains more than that of a process that should come to it
                await bringing
            if bringing.exception() is not None:
                await asyncio.wait({waiting}, timeout=_GRACE_S)
            if waiting.done() or bringing.exception() is None:
                await waiting
            await bringing
        finally:
            waiting.cancel()
            bringing.cancel()

    async def _bring(self, rendezvous: ActorMesh[Rendezvous], place: RankPlace) -> None:
        """If there may be several hosts, start the process for a volume of this rank, or of its host."""
        way = self._way
        assert way is not None  # `_meet` has opened or entered the job
        is_first = place.local_rank == 0 or not isinstance(self._strategy, HostStrategy)
        if way.gate is None or not is_first:
            return
        self._companion = await asyncio.to_thread(
            Companion, way.gate, way.run, f"volume of rank {place.rank}", place.local_pids, timeout=self._left()
        )
        if self._gave_up.is_set():
            self._companion.give_up()
        process_id = await asyncio.to_thread(self._companion.process_id)
        await ask(rendezvous.bring.call_one(place.rank, process_id), self._left())

    async def _start(self, rendezvous: ActorMesh[Rendezvous], place: RankPlace, settings: dict[str, Any]) -> None:
        """Start the store, when no more processes will join the job."""
        assert isinstance(self._way, OpenedJob)  # this is rank 0
        count = place.num_hosts if isinstance(self._strategy, HostStrategy) else place.world_size
        mesh: ProcMesh | None = None
        if self._way.gate is not None:
            brought = await ask(rendezvous.brought.call_one(count, self._left()), self._left() + _GRACE_S)
            mesh = _mesh_of(brought)
        await asyncio.to_thread(self._way.close)
        await api.initialize(count, self._strategy, self._store_name, mesh, **settings, timeout=self._left())
        self._has_started = True
        await ask(rendezvous.started.call_one(), self._left())

    def _left(self) -> float:
        return _left(self._deadline)


def _of_ranks(strategy: TorchStoreStrategy, store_name: str) -> TorchStoreStrategy:
    """The strategy that uses the places of the ranks; a user's own strategy stays unchanged."""
    if type(strategy) is HostStrategy:
        return HostVolumes()
    return RankVolumes(store_name) if type(strategy) is LocalRankStrategy else strategy


def _mesh_of(process_ids: Sequence[str]) -> ProcMesh:
    """Processes that have joined the job of this one, as one mesh."""
    process = runtime.current()
    joined = {mesh.root_members[0].id: mesh.root_members[0] for mesh in process.members.meshes()}
    members = tuple(joined[process_id] for process_id in process_ids if process_id in joined)
    if len(members) < len(process_ids):
        raise StoreRendezvousError("a process that a rank started for a volume has ended")
    extent = Extent.of({"ranks": len(members)})
    return ProcMesh(secrets.randbits(63), "volumes of ranks", members, extent, Shape.whole(extent), process.me)


def arrival_of(rank: int) -> Arrival:
    """This process as a rank."""
    return Arrival(rank, this_network(), os.getpid(), os.stat("/proc/self/ns/pid").st_ino, this_proc())


def _leave_if_alone(*, but: str | None = None) -> None:
    """Leave the job after the last store that needs it; ``but`` names a store that is being given up."""
    global _has_joined
    if _has_joined and not _sessions and not _beginning - {but}:
        _has_joined = False
        control.shutdown()


def _forget_all() -> None:
    """Drop stores that have not been shut down: this process is leaving the job, or the job has ended."""
    global _has_joined
    _has_joined = False
    for store_name, session in list(_sessions.items()):
        del _sessions[store_name]
        note_place(store_name, None)
        api.shut_down_together.pop(store_name, None)
        if session.companion is not None:
            session.companion.close()
    dismiss()


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)
