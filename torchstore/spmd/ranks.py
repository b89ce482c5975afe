"""Which rank of an SPMD job this process is: from the environment of the launcher, and from the ranks' agreement.

`Launch.find` asks, in this order: explicit arguments, an initialized ``torch.distributed``, the variables of torchrun
(which plain processes, Ray and verl workers set, too), of Open MPI, of MPICH and its derivatives, and of Slurm.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch.distributed as dist

from skipper.torchstore.errors import RankEnvironmentError

_FIRST_NODE = re.compile(r"(?P<stem>[^\[,]+)(?:\[(?P<first>[0-9]+)[^\]]*\])?(?P<rest>[^,]*)")
"""The first name of Slurm's list of nodes: ``gpu[003-007,9],other`` begins with ``gpu003``."""


@dataclass(frozen=True, slots=True)
class SPMDEnv:
    """One rank of an SPMD job, as ``torchrun`` describes it in the environment.

    Attributes:
        rank: The rank among all ranks.
        local_rank: The rank among those of its host.
        world_size: How many ranks there are.
        local_world_size: How many there are on each host.
        master_addr: The address of rank 0, where the ranks meet.
        master_port: The port there.

    Example:
        ```python
        import os

        from skipper.torchstore import SPMDEnv

        # torchrun sets these:
        os.environ |= {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
        env = SPMDEnv.from_env(master_addr="127.0.0.1", master_port=29500)
        print(env.rank, env.group_rank, env.num_hosts)  # 5 1 2
        ```
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
    def from_env(cls, *, master_addr: str | None = None, master_port: int | None = None) -> Self:
        """Read RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

        Args:
            master_addr: The address if MASTER_ADDR is not set.
            master_port: The port if MASTER_PORT is not set.

        Raises:
            RankEnvironmentError: (a `ValueError`) one of them is missing or not a number, or they contradict each
                other.
        """
        env = os.environ
        found = cls(
            rank=_number(env, "RANK"),
            local_rank=_number(env, "LOCAL_RANK"),
            world_size=_number(env, "WORLD_SIZE"),
            local_world_size=_number(env, "LOCAL_WORLD_SIZE"),
            master_addr=env.get("MASTER_ADDR") or master_addr or _missing("MASTER_ADDR"),
            master_port=_number(env, "MASTER_PORT", master_port),
        )
        local = found.local_world_size
        if local < 1 or found.world_size % local or not 0 <= found.rank < found.world_size:
            raise RankEnvironmentError(f"RANK, WORLD_SIZE and LOCAL_WORLD_SIZE do not fit together: {found}")
        return found


@dataclass(frozen=True, slots=True)
class Launch:
    """One rank, as described by its launcher; the rest is found out when the ranks meet.

    Attributes:
        rank: The rank among all ranks.
        world_size: The number of ranks.
        local_world_size: The number of ranks on this host; None: unknown.
        master_addr: The host of rank 0, as a name or an IP; None: unknown.
        master_port: The port of ``torch.distributed`` there; None: unknown.
        job: The launcher's name for this run; empty if it has none.
        has_group: Whether ``torch.distributed`` is initialized for just these ranks.
    """

    rank: int
    world_size: int
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    job: str = ""
    has_group: bool = False

    def __post_init__(self) -> None:
        local = self.local_world_size
        fits = 0 <= self.rank < self.world_size and (local is None or 0 < local <= self.world_size)
        if not fits:
            raise RankEnvironmentError(f"these do not fit together: {self}")

    @property
    def is_one_host(self) -> bool | None:
        """Whether all ranks are on one host; None: unknown."""
        return None if self.local_world_size is None else self.local_world_size == self.world_size

    def token(self, store_name: str) -> str:
        """A name for a store that these ranks have in common, different from those of all other ranks of this user.

        Raises:
            RankEnvironmentError: The launcher has set nothing that identifies these ranks, except their number.
        """
        if not self.job and (self.master_addr is None or self.master_port is None):
            _missing("MASTER_ADDR" if self.master_addr is None else "MASTER_PORT")
        parts = (self.job, self.master_addr, self.master_port, self.world_size, store_name)
        return f"spmd-{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}"

    @classmethod
    def find(cls, env: SPMDEnv | None = None, *, rank: int | None = None, world_size: int | None = None) -> Launch:
        """Find out which rank this is.

        Args:
            env: The rank, given explicitly; nothing else is used.
            rank: The rank, with ``world_size``; the rest comes from the environment.
            world_size: See ``rank``.

        Raises:
            RankEnvironmentError: (a `ValueError`) a variable is missing or is no number, and the message names it; or
                they do not fit together.
        """
        around = os.environ
        master_addr, master_port = around.get("MASTER_ADDR") or None, _optional(around, "MASTER_PORT")
        job = _job(around)
        if env is not None:
            local, addr, port = env.local_world_size, env.master_addr, env.master_port
            return cls(env.rank, env.world_size, local, addr, port, job, _has_group(env.rank, env.world_size))
        if (rank is None) != (world_size is None):
            raise RankEnvironmentError("pass rank= and world_size= together")
        if rank is not None and world_size is not None:
            has_group = _has_group(rank, world_size)
            return cls(rank, world_size, None, master_addr, master_port, job, has_group)
        if dist.is_available() and dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
            same = around.get("WORLD_SIZE") == str(world_size)
            local_size = _optional(around, "LOCAL_WORLD_SIZE") if same else None
            return cls(rank, world_size, local_size, master_addr, master_port, job, has_group=True)
        if not any(name in around for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
            for rank_name, size_name, local_name in _LAUNCHERS:
                if rank_name in around and size_name in around:
                    local_size = _optional(around, local_name)
                    numbers = _number(around, rank_name), _number(around, size_name)
                    return cls(*numbers, local_size, master_addr, master_port, job)
            if "SLURM_PROCID" in around and "SLURM_STEP_NUM_TASKS" in around:
                return cls._of_slurm(around, master_addr, master_port, job)
        rank, world_size = _number(around, "RANK"), _number(around, "WORLD_SIZE")
        if "LOCAL_RANK" in around:  # not used here, but a sign of a mistake if it is not a number
            _number(around, "LOCAL_RANK")
        local_size = _optional(around, "LOCAL_WORLD_SIZE")
        return cls(rank, world_size, local_size, master_addr, master_port, job)

    @classmethod
    def _of_slurm(cls, around: Mapping[str, str], addr: str | None, port: int | None, job: str) -> Launch:
        rank, world_size = _number(around, "SLURM_PROCID"), _number(around, "SLURM_STEP_NUM_TASKS")
        is_one_host = around.get("SLURM_STEP_NUM_NODES") == "1"
        if addr is None and (nodes := _FIRST_NODE.match(around.get("SLURM_STEP_NODELIST", ""))) is not None:
            addr = nodes["stem"] + (nodes["first"] or "") + nodes["rest"]
        tasks = re.match("[0-9]+", around.get("SLURM_STEP_TASKS_PER_NODE", ""))
        local = world_size if is_one_host else (int(tasks[0]) if tasks is not None else None)
        return cls(rank, world_size, local, addr, port, job)


_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)
"""The variables of Open MPI and of MPICH (Hydra, Intel MPI). They come before Slurm, under which they may run."""

_JOBS = (
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ("PMIX_NAMESPACE",),
    ("OMPI_MCA_ess_base_jobid",),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
"""Variables that identify one run; the first group that is completely set counts."""


def _job(around: Mapping[str, str]) -> str:
    return next(
        (":".join(around[name] for name in names) for names in _JOBS if all(name in around for name in names)), ""
    )


def _has_group(rank: int, world_size: int) -> bool:
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return (dist.get_rank(), dist.get_world_size()) == (rank, world_size)


def _number(around: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = around.get(name)
    if text is None:
        return default if default is not None else int(_missing(name))
    if not (text.isascii() and text.isdecimal()):
        raise RankEnvironmentError(f"{name} is {text!r} and should be a number")
    return int(text)


def _optional(around: Mapping[str, str], name: str) -> int | None:
    return _number(around, name) if name in around else None


def _missing(name: str) -> str:
    raise RankEnvironmentError(
        f"initialize_spmd runs under a launcher, such as torchrun, or with {name} set: the environment has none"
    )


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a rank among those that have initialized a store together.

    Attributes:
        rank: The rank among all ranks.
        world_size: The number of ranks.
        local_rank: The rank among those of its host.
        local_world_size: The number of ranks on its host.
        host_rank: The number of its host, in the order of the lowest rank of each host.
        num_hosts: The number of hosts.
        local_pids: The process ids of the ranks of this host that are in the same pid namespace.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host_rank: int
    num_hosts: int
    local_pids: tuple[int, ...] = ()


_places: dict[str, RankPlace] = {}


def place_of(store_name: str) -> RankPlace | None:
    """The place of this process in a store of `initialize_spmd`; None if it has initialized no store of this name."""
    return _places.get(store_name)


def note_place(store_name: str, place: RankPlace | None) -> None:
    """Record the place of this process in a store; None: it has left the store."""
    if place is None:
        _places.pop(store_name, None)
    else:
        _places[store_name] = place
