"""`initialize_spmd`: a store for the ranks of a ``torchrun`` job, each of which makes the same calls.

Rank 0 becomes the root of a control job, starts the store in it, and tells the others where its connection file lies;
they join. What is told goes through the store of ``torch.distributed`` at which ``torchrun`` has them meet: a path,
never the job's secret.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from secrets import token_hex
from typing import Any, TypeVar

import torch.distributed as dist

import control
from control import ControlError, ServedJob, this_proc
from torchstore import api, origin
from torchstore.clients import DEFAULT_STORE_NAME, controller_of, reset_client
from torchstore.coroutines import public
from torchstore.errors import RendezvousError, StoreError, StoreNotInitializedError, StoreTimeoutError, StrategyError
from torchstore.process import this_process
from torchstore.remote import DEFAULT_TIMEOUT_S, ask
from torchstore.strategy import HostStrategy, LocalRankStrategy, TorchStoreStrategy

T = TypeVar("T")

_OK = "ok:"
_ERROR = "error:"
_JOB = "the job of rank 0"

_rounds: Counter[str] = Counter()
"""How often each store was initialized here: every rank counts alike, so that no round reads the words of another."""

_sessions: dict[str, _Session] = {}
_has_joined = False
"""Whether this process is in a job because a store here has joined it."""


@dataclass(frozen=True, slots=True)
class SPMDEnv:
    """One rank of an SPMD job, as ``torchrun`` describes it in the environment.

    Attributes:
        rank: Among all ranks.
        local_rank: Among those of its host.
        world_size: How many ranks there are.
        local_world_size: How many there are on each host.
        master_addr: Where the ranks meet.
        master_port: Where the ranks meet.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int

    @property
    def num_hosts(self) -> int:
        """How many hosts there are."""
        return self.world_size // self.local_world_size

    @property
    def group_rank(self) -> int:
        """The number of this host."""
        return self.rank // self.local_world_size

    @classmethod
    def from_env(cls, *, master_addr: str | None = None, master_port: int | None = None) -> SPMDEnv:
        """Read RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

        Args:
            master_addr: Where MASTER_ADDR is not set.
            master_port: Where MASTER_PORT is not set.

        Raises:
            RendezvousError: One of them is missing, is no number, or they contradict each other.
        """
        env = cls(
            rank=_number("RANK"),
            local_rank=_number("LOCAL_RANK"),
            world_size=_number("WORLD_SIZE"),
            local_world_size=_number("LOCAL_WORLD_SIZE"),
            master_addr=os.environ.get("MASTER_ADDR") or master_addr or _missing("MASTER_ADDR"),
            master_port=_number("MASTER_PORT", master_port),
        )
        if env.local_world_size < 1 or env.world_size % env.local_world_size or not 0 <= env.rank < env.world_size:
            raise RendezvousError(f"RANK, WORLD_SIZE and LOCAL_WORLD_SIZE do not fit together: {env}")
        return env


@dataclass(slots=True)
class _Session:
    """A store that all ranks have initialized together."""

    store_name: str
    client: int
    served: ServedJob | None

    async def shutdown(self, timeout: float) -> None:
        """Rank 0 shuts the store down; the others wait until it has, and leave the job with their last store."""
        _sessions.pop(self.store_name, None)
        try:
            if self.served is not None:
                self.served.close()
                await api.teardown(self.store_name, timeout)
            else:
                reset_client(self.store_name)
                controller = await controller_of(self.store_name, timeout)
                with suppress(StoreNotInitializedError):  # it has just been shut down
                    await ask(controller.wait_for_teardown.call_one(self.client, timeout), timeout)
        finally:
            await asyncio.to_thread(_leave_if_alone)


@public
async def initialize_spmd(
    strategy: TorchStoreStrategy | None = None,
    store_name: str = DEFAULT_STORE_NAME,
    *,
    env: SPMDEnv | None = None,
    rendezvous_timeout: timedelta = timedelta(seconds=120),
    transport: str | None = None,
    python_exe: str | None = None,
    monarch_port: int | None = None,
    ssh_args: Sequence[str] = (),
    keep_versions: int = 1,
    volume_nbytes: int | None = None,
    checksum: bool = False,
) -> None:
    """Start a store from within an SPMD job: every rank calls it, and may use the store when it returns.

    The volumes run in processes of their own, one for each rank with `LocalRankStrategy` and one for the host with
    `HostStrategy`; they and the store's controller live as long as rank 0. `shutdown` is called by every rank, too: it
    returns when rank 0 has done it. All ranks are on one host so far.

    Args:
        strategy: `LocalRankStrategy` or `HostStrategy`.
        store_name: Stores of different names know nothing of each other.
        env: Which rank this is; None: as `SPMDEnv.from_env` says.
        rendezvous_timeout: How long the ranks wait for each other.
        transport: Accepted, like the next three, for callers of Meta's torchstore; no process is started by them here.
        python_exe: See ``transport``.
        monarch_port: See ``transport``.
        ssh_args: See ``transport``.
        keep_versions: See `initialize`; what rank 0 says holds.
        volume_nbytes: See `initialize`; what rank 0 says holds.
        checksum: See `initialize`; what rank 0 says holds.

    Raises:
        StrategyError: (a `ValueError`) no strategy, or another one; or the store is running already.
        RendezvousError: The environment does not describe a rank, or another rank has failed; the message is its.
        StoreTimeoutError: (a `TimeoutError`) not all ranks came in time; the message names those that did not.
        RemoteHostError: (control's) the ranks are on several hosts.
        AlreadyInJobError: (control's) this process is part of another job.
    """
    if not isinstance(strategy, HostStrategy | LocalRankStrategy):
        raise StrategyError("initialize_spmd needs strategy=LocalRankStrategy() or strategy=HostStrategy()")
    env = env or SPMDEnv.from_env()
    if env.num_hosts > 1:
        raise control.RemoteHostError(
            f"{env.world_size} ranks on {env.num_hosts} hosts: a store for the ranks of several hosts is not there yet"
        )
    deadline = time.monotonic() + rendezvous_timeout.total_seconds()
    _rounds[store_name] += 1
    board = await asyncio.to_thread(_Board.open, env, f"torchstore/spmd/{store_name}/{_rounds[store_name]}", deadline)
    served: ServedJob | None = None
    has_started = False
    try:
        if env.rank == 0:
            served = control.serve_job(f"spmd-{token_hex(8)}")
            volumes = env.num_hosts if isinstance(strategy, HostStrategy) else env.world_size
            await api.initialize(
                volumes,
                strategy,
                store_name,
                keep_versions=keep_versions,
                volume_nbytes=volume_nbytes,
                checksum=checksum,
                timeout=_left(deadline),
            )
            has_started = True
            path = str(served.path)
            await asyncio.to_thread(board.tell, _JOB, path)
        else:
            path = await asyncio.to_thread(board.hear, _JOB)
            await asyncio.to_thread(_join, path, _rank(env.rank), deadline)
        controller = await controller_of(store_name, _left(deadline))
        info = await ask(controller.info.call_one(this_process(), this_proc()), _left(deadline))
        await asyncio.to_thread(board.tell, _rank(env.rank), "")
        await asyncio.to_thread(board.hear_all, [_rank(rank) for rank in range(env.world_size)])
    except BaseException as error:
        if isinstance(error, StoreError | ControlError):
            await asyncio.to_thread(board.fail, _rank(env.rank), error)
        if served is not None:
            served.close()
        if has_started:
            with suppress(StoreError, ControlError):
                await api.teardown(store_name, DEFAULT_TIMEOUT_S)
        _leave_if_alone()
        raise
    if not _sessions:
        origin.enrol(f"spmd {path}", env.rank, env.world_size)
    session = _sessions[store_name] = _Session(store_name, info.client, served)
    api.shut_down_together[store_name] = session.shutdown


initialize = initialize_spmd
"""The name that it has in this module in Meta's torchstore."""


def _join(path: str, name: str, deadline: float) -> None:
    global _has_joined
    _has_joined = control.join(path, name=name, timeout=_left(deadline)) or _has_joined


def _leave_if_alone() -> None:
    """Leave the job that was joined for a store, with the last one."""
    global _has_joined
    if not _sessions:
        origin.dismiss()
    if _has_joined and not _sessions:
        _has_joined = False
        control.shutdown()


@dataclass(slots=True)
class _Board:
    """Where the ranks of one round tell each other how far they are; each call blocks until the deadline at most."""

    store: Any
    deadline: float

    @staticmethod
    def open(env: SPMDEnv, prefix: str, deadline: float) -> _Board:
        """Meet the other ranks.

        Raises:
            StoreTimeoutError: Nobody is there.
        """
        url = f"tcp://{env.master_addr}:{env.master_port}"
        timeout = timedelta(seconds=_left(deadline))
        meeting = _translated(
            lambda: next(dist.rendezvous(url, env.rank, env.world_size, timeout=timeout)),  # type: ignore[attr-defined]
            f"rank {env.rank} could not reach the other ranks at {env.master_addr}:{env.master_port}",
        )
        return _Board(dist.PrefixStore(prefix, meeting[0]), deadline)  # type: ignore[attr-defined]

    def tell(self, key: str, text: str) -> None:
        """Let all ranks know something."""
        _translated(lambda: self.store.set(key, _OK + text), f"{key!r} could not be told to the other ranks")

    def fail(self, rank: str, error: Exception) -> None:
        """Let all ranks know that this one has failed, if there is still somebody to tell."""
        with suppress(dist.DistError):
            for key in (rank, _JOB) if rank == _rank(0) else (rank,):
                self.store.set(key, f"{_ERROR}{rank} failed: {type(error).__name__}: {error}")

    def hear(self, key: str) -> str:
        """Wait for what a rank tells.

        Raises:
            RendezvousError: It has failed.
            StoreTimeoutError: It told nothing in time.
        """
        timeout = timedelta(seconds=_left(self.deadline))
        _translated(lambda: self.store.wait([key], timeout), f"waited for {key!r} of the other ranks")
        text = str(_translated(lambda: self.store.get(key), f"could not read {key!r}").decode())
        if text.startswith(_ERROR):
            raise RendezvousError(text.removeprefix(_ERROR))
        return text.removeprefix(_OK)

    def hear_all(self, keys: list[str]) -> None:
        """Wait for all of these.

        Raises:
            RendezvousError: One has failed.
            StoreTimeoutError: Some told nothing in time; the message names them.
        """
        for key in keys:
            try:
                self.hear(key)
            except StoreTimeoutError as error:
                missing = [key for key in keys if not self.store.check([key])]
                raise StoreTimeoutError(f"{', '.join(missing)} did not come: {error}") from error


def _translated(call: Callable[[], T], doing: str) -> T:
    """Do something with torch's store, in this package's errors.

    Raises:
        StoreTimeoutError: It took too long.
        RendezvousError: It failed otherwise, for instance since the rank that hosts it has died.
    """
    try:
        return call()
    except dist.DistStoreError as error:
        raise StoreTimeoutError(f"{doing}: {_headline(error)}") from error
    except (dist.DistError, ValueError) as error:
        raise RendezvousError(f"{doing}: {_headline(error)}") from error


def _headline(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _rank(number: int) -> str:
    return f"rank {number}"


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None:
        return default if default is not None else int(_missing(name))
    if not text.isdecimal():
        raise RendezvousError(f"{name} is {text!r} and should be a number")
    return int(text)


def _missing(name: str) -> str:
    raise RendezvousError(f"initialize_spmd runs under torchrun, or with {name} set: the environment has none")
