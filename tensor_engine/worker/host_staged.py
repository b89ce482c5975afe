"""Tensors of GPUs moved through the host, for workers that share a GPU: NCCL allows one rank for each GPU.

This is far slower than NCCL, with the same results: so a program for many GPUs can be tried on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Store


class HostStaged:
    """The operations of a torch backend that `Group` uses, over a backend for tensors on the host.

    Tensors to send are first copied to the host, in the order of the current stream. `wait` copies received ones to
    their targets, in the order of the stream that is then current.

    Args:
        backend: Gloo's, between the same members.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def alltoall_base(
        self, incoming: torch.Tensor, outgoing: torch.Tensor, in_splits: Any, out_splits: Any, options: Any
    ) -> _Pending:
        """As that of a torch backend."""
        here, there = outgoing.to("cpu", copy=True), torch.empty_like(incoming, device="cpu")
        work = self._backend.alltoall_base(there, here, in_splits, out_splits, options)
        return _Pending(work, [here], [(incoming, there)])

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> _Pending:
        """As that of a torch backend."""
        here = [tensor.to("cpu", copy=True) for tensor in tensors]
        return _Pending(self._backend.send(here, to, tag), here, [])

    def recv(self, tensors: Sequence[torch.Tensor], sender: int, tag: int) -> _Pending:
        """As that of a torch backend."""
        there = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        work = self._backend.recv(there, sender, tag)
        return _Pending(work, [], list(zip(tensors, there, strict=True)))

    def abort(self) -> None:
        """As that of a torch backend."""
        self._backend.abort()


class _Pending:
    """An operation in flight. It keeps the host memory that it uses.

    Attributes:
        sent: Memory that must not change before it is over.
        coming: The target of each tensor, and the memory where it arrives.
    """

    def __init__(
        self, work: Any, sent: list[torch.Tensor], coming: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._work = work
        self.sent = sent
        self.coming = coming

    def wait(self) -> None:
        """Wait until it is over; raises what the backend raises."""
        self._work.wait()
        for target, arrived in self.coming:
            target.copy_(arrived)


def share_a_gpu(store: Store, rank: int, size: int, gpu: str) -> bool:
    """Whether two of the members use the same GPU. Every member must call it, with the identity of its GPU."""
    store.set(f"gpu of {rank}", gpu)
    return len({store.get(f"gpu of {member}") for member in range(size)}) < size
