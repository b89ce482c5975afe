"""`exchange`: every worker of a group gives every other one a row, and all learn who has none.

All collectives are made of it. A row is some elements of one dtype; with it, in the same message, goes a flag that says
that its sender has no value, since the operation that should have made it failed. So no worker waits for one that has
nothing to give, and all of them know in the same moment.

Small rows travel inside the messages. Within a host large ones do not: everybody copies its rows to a block of shared
memory, the messages carry flags and handles, and each reads from the others' blocks what is meant for it.
"""

from __future__ import annotations

import torch

from skipper.tensor_engine.worker.groups import Group
from skipper.tensor_engine.worker.staging import CARD_NBYTES, Peers, StagingBlock

STAGED_FROM_NBYTES = 64 << 10
"""Size of what a worker has to give from which shared memory is faster than messages."""
_ALIGNMENT = 16  # of the rows in a message: no dtype needs more


class _Stages:
    """The blocks of one member, used in turn.

    Two are enough without anybody saying when it has read: messages of an exchange reach a worker only after everybody
    has begun it, so has ended the one before and does not read any more what was written for that.
    """

    def __init__(self) -> None:
        self._stages = (StagingBlock(), StagingBlock())
        self.peers = Peers()
        self.turn = 0

    def next(self) -> StagingBlock:
        self.turn = 1 - self.turn
        return self._stages[self.turn]


def exchange(
    group: Group,
    rows: torch.Tensor | None,
    out: torch.Tensor,
    *,
    wanted: bool = True,
) -> list[int]:
    """Give each member a row and get one from each. Called under `Group.guard`, by all members.

    Args:
        group: this worker and the others.
        rows: what to give: row i of shape (size, n) goes to member i; all get the same of shape (1, n). None if this
            worker has no value.
        out: where row i of member i is put, of shape (size, n), the same n and dtype for all members; each row
            contiguous. Undefined if any member had no value.
        wanted: False if this worker has no use for what it gets: ``out`` is undefined then.

    Returns:
        The ranks of the members that had no value.
    """
    n, size, nbytes = out.shape[1], group.size, out.shape[1] * out.itemsize
    count = size if rows is None else rows.shape[0]
    if size == 1:
        if rows is None:
            return [0]
        out.copy_(rows)
        return []
    # Which way it goes has to follow from what all members know, so not from `count`.
    if group.same_host and nbytes * size >= STAGED_FROM_NBYTES:
        return _staged(group, rows, out, count, wanted)
    end = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    outgoing = torch.empty((size, end + _ALIGNMENT), dtype=torch.uint8, device=group.device)
    incoming = torch.empty_like(outgoing)
    outgoing[:, end] = rows is None
    if rows is not None and n:
        outgoing[:, :nbytes].view(out.dtype).copy_(rows)
    group.swap(outgoing, incoming)
    missing = _ranks(incoming[:, end])
    if not missing and wanted and n:
        out.copy_(incoming[:, :nbytes].view(out.dtype))
    return missing


def _staged(group: Group, rows: torch.Tensor | None, out: torch.Tensor, count: int, wanted: bool) -> list[int]:
    stages = group.scratch.get("exchange")
    if stages is None:
        stages = group.scratch["exchange"] = _Stages()
    stage, nbytes, rank = stages.next(), out.shape[1] * out.itemsize, group.rank
    if rows is not None:
        stage.room(count * nbytes).view(out.dtype).view(count, out.shape[1]).copy_(rows)
    # Byte 0 says that there is no value, byte 1 that all members read the same row.
    outgoing = torch.zeros((group.size, 2 + CARD_NBYTES), dtype=torch.uint8)
    outgoing[:, 0], outgoing[:, 1], outgoing[:, 2:] = rows is None, count == 1, stage.card
    incoming = torch.empty_like(outgoing)
    group.swap(outgoing, incoming)
    missing = _ranks(incoming[:, 0])
    if missing or not wanted or rows is None:
        return missing
    same = incoming[:, 1].tolist()
    reads = [
        stages.peers.read(
            peer,
            stages.turn,
            incoming[peer, 2:],
            0 if same[peer] else rank * nbytes,
            out[peer],
            timeout_s=group.timeout_s,
        )
        for peer in range(group.size)
        if peer != rank
    ]
    out[rank].copy_(rows[0 if count == 1 else rank])
    for read in reads:
        read.get()
    return []


def _ranks(flags: torch.Tensor) -> list[int]:
    return [rank for rank, flag in enumerate(flags.tolist()) if flag]
