"""Process groups of the workers: one for each set of workers and stream, made at its first use."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from skipper.dataplane import DataplaneError, RDMABuffer
from skipper.tensor_engine.errors import (
    CommunicationError,
    CommunicationTimeoutError,
    MemberLostError,
    UnreachableMembersError,
)
from skipper.tensor_engine.shared.rendezvous import JobStore, RendezvousClient
from skipper.tensor_engine.worker.device import identity
from skipper.tensor_engine.worker.gloo_group import make_gloo
from skipper.tensor_engine.worker.host_staged import HostStaged, share_a_gpu

DEFAULT_TIMEOUT_S = (
    1800.0  # how long an operation of another worker may take; a worker that is gone is detected at once
)


class Group:
    """Some workers that communicate, seen from one of them.

    For one thread: the workers' streams have groups of their own. All members call the same operations in the same
    order. After a failed operation the group is broken: its connections are closed, so that it fails on the others at
    once.

    Attributes:
        members: the numbers of the workers; their order gives the ranks.
        rank: of this worker in the group.
        device: of the tensors that it moves.
        same_host: whether all members share a kernel, and so can map each other's memory.
        timeout_s: for each operation.
    """

    def __init__(
        self, backend: Any, members: tuple[int, ...], rank: int, device: torch.device, timeout_s: float
    ) -> None:
        self.members = members
        self.rank = rank
        self.size = len(members)
        self.device = device
        self.timeout_s = timeout_s
        self._backend = backend
        self._broken: str | None = None
        self.same_host = device.type == "cpu" and self._share_a_host()
        self.scratch: dict[str, Any] = {}  # memory that `exchange` and `point_to_point` keep between uses

    @property
    def backend(self) -> Any:
        """The torch backend, for use under `guard`."""
        if self._backend is None:
            raise CommunicationError(f"{self} is closed" if self._broken is None else self._broken)
        return self._backend

    @contextlib.contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Turn exceptions of backends into errors of this package, and break the group.

        Raises:
            CommunicationTimeoutError: the others did not come in time.
            CommunicationError: a member is gone, or the group was broken before.
        """
        if self._broken is not None:
            raise CommunicationError(self._broken)
        try:
            yield
        except (RuntimeError, DataplaneError) as error:
            reason = f"{what} failed on {self}: {error}"
            self._broken = f"{self} cannot be used any more, because {reason}"
            self.close()
            raise (CommunicationTimeoutError if _is_late(error) else CommunicationError)(reason) from error
        except BaseException as error:
            # The others wait for the rest of an operation that this member has aborted.
            self._broken = f"{self} cannot be used any more: {what} ended with {type(error).__name__}"
            self.close()
            raise

    def swap(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        """Send row i of ``outgoing`` to member i, whose row for this one becomes row i of ``incoming``.

        Both are contiguous uint8 on the group's device, of shape (size, n). All communication with several members at
        once uses this: it is by far the fastest of gloo's collectives, and the only one that covers all cases.
        """
        self.backend.alltoall_base(incoming, outgoing, [], [], dist.AllToAllOptions()).wait()

    def close(self) -> None:
        """Close the connections. Idempotent."""
        backend, self._backend = self._backend, None
        if backend is not None:
            # On a broken connection even this may fail, and then nothing is left to close.
            with contextlib.suppress(RuntimeError):
                backend.abort()
        self.scratch = {}  # only now: messages may have been in flight from this memory

    def __repr__(self) -> str:
        return f"the group of workers {', '.join(map(str, self.members))}"

    def _share_a_host(self) -> bool:
        if self.size == 1:
            return True
        mine = RDMABuffer(bytearray(8)).owner.host - (1 << 63)
        sent = torch.full((self.size, 1), mine, dtype=torch.int64)
        got = torch.empty_like(sent)
        with self.guard("the first exchange"):
            self.swap(sent.view(torch.uint8), got.view(torch.uint8))
        return bool((got == mine).all())


class Groups:
    """The groups of one stream of one worker.

    Every worker has a number that is unique in the script, over all meshes, so that a group may span meshes.

    Args:
        number: of this worker.
        stream: the stream; streams run concurrently, so each has groups of its own.
        device: of the tensors: gloo moves tensors on ``"cpu"``, NCCL those on ``"cuda"``; if members share a GPU, gloo
            also moves these, through the host.
        timeout_s: for making a group and for each of its operations.
    """

    def __init__(
        self,
        number: int,
        *,
        stream: str = "main",
        device: str | torch.device = "cpu",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.number = number
        self.device = torch.device(device)
        self.timeout_s = timeout_s
        self._stream = stream
        self._rendezvous: RendezvousClient | None = None
        self._groups: dict[tuple[int, ...], Group] = {}

    def get(self, members: tuple[int, ...]) -> Group:
        """The group of these workers, this one among them.

        The first time, all of them make it and wait for each other. They must make groups in the same order: this is so
        if the instructions of a script make them.

        Raises:
            CommunicationTimeoutError: the others did not come in time.
            CommunicationError: one of them is gone.
            ValueError: this worker is not among them.
        """
        group = self._groups.get(members)
        if group is None:
            if self.number not in members:
                raise ValueError(f"worker {self.number} is not one of {members}")
            # One worker needs no backend.
            backend = self.new_backend(members)[1] if len(members) > 1 else None
            rank = members.index(self.number)
            group = self._groups[members] = Group(backend, members, rank, self.device, self.timeout_s)
        return group

    def close(self) -> None:
        """Close all groups. Idempotent; `get` makes them again."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.close()
        self._rendezvous = None

    def new_backend(self, members: tuple[int, ...]) -> tuple[Store, Any]:
        """A store and a torch backend for these workers, this one among them; all of them must make it.

        Raises:
            CommunicationTimeoutError: the others did not come in time.
            MemberLostError: one of them has ended.
            UnreachableMembersError: they are on several hosts that do not reach each other, and have no GPUs.
            CommunicationError: one of them is gone.
        """
        name, rank = f"{self._stream}/{'-'.join(map(str, members))}", members.index(self.number)
        try:
            if self._rendezvous is None:
                self._rendezvous = RendezvousClient(self.timeout_s)
            store = JobStore(self._rendezvous, name, members) if len(members) > 1 else HashStore()
            return store, self._backend(self._rendezvous, store, name, rank, members)
        except (MemberLostError, UnreachableMembersError):
            raise
        except RuntimeError as error:
            kind = CommunicationTimeoutError if _is_late(error) else CommunicationError
            raise kind(
                f"worker {self.number} could not reach the others of {members} within {self.timeout_s} s: {error}"
            ) from error

    def _backend(
        self, rendezvous: RendezvousClient, store: Store, name: str, rank: int, members: tuple[int, ...]
    ) -> Any:
        if self.device.type != "cuda":
            return make_gloo(rendezvous, name, rank, members)
        if share_a_gpu(store, rank, len(members), identity()):
            return HostStaged(make_gloo(rendezvous, f"{name}/by way of the host", rank, members))
        nccl: Any = dist.ProcessGroupNCCL.Options()
        nccl._timeout = datetime.timedelta(seconds=self.timeout_s)
        return dist.ProcessGroupNCCL(store, rank, len(members), nccl)


def _is_late(error: Exception) -> bool:
    """Whether a deadline has passed: torch says so only in its message."""
    text = str(error).lower()
    return isinstance(error, TimeoutError) or "timed out" in text or "timeout" in text
