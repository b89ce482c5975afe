"""What the workers of a group do together: reductions, gathering, all-to-all.

Each function takes the group, this worker's value, and the metadata that the script expects of the value on every
member. The value is a tensor, or poison if the operation that should have made the tensor failed. A worker with poison
takes part all the same, so nobody waits for it. The result on every member is then the poison of the member of lowest
rank.

The script has checked the arguments before it sent anything. Only a user's function that returns something else than it
promised can give a value that is not as the script expects. Then all members raise a `CommunicationError`. They also
raise one if a member is gone or late.

All collectives are made of `exchange`, in which every worker gives every other one a row: elements of one dtype. In the
same message goes a flag which says that the sender has no value. Small rows travel inside the messages. Within a host
large ones do not: each worker copies its rows to a block of shared memory, the messages carry flags and handles, and
each worker reads its rows from the blocks of the others.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from skipper.tensor_engine.errors import CommunicationError
from skipper.tensor_engine.shared.metadata import TensorMetadata
from skipper.tensor_engine.shared.reductions import combine
from skipper.tensor_engine.worker.groups import Group
from skipper.tensor_engine.worker.staging import CARD_NBYTES, Peers, StagingBlock

MemberValue = Any
"""A tensor, or a picklable object that stands for one that could not be made."""

SEGMENT_NBYTES = 16 << 20
"""Larger values go in pieces of this size: shared memory for them stays bounded, and in the caches."""
ONE_PHASE_NBYTES = 64 << 10
"""Up to this size each member gets all values and reduces them: one message in place of two."""
STAGED_FROM_NBYTES = 64 << 10
"""Size of what a worker has to give from which shared memory is faster than messages."""
_ALIGNMENT = 16  # of the rows in a message: no dtype needs more


def all_reduce(
    group: Group, value: MemberValue, expected: TensorMetadata, reduction: str, *, to: Sequence[int] | None = None
) -> MemberValue:
    """The values of all members reduced to one of the same shape, contiguous and fresh.

    The reduction is any of `reductions` but ``"stack"``. ``to`` are the ranks that need the result, None for all; the
    others get None.
    """
    with group.guard(f"{reduction} of {expected}"):
        flat, fault = _flat(group, value, expected)
        out = torch.empty(expected.shape, dtype=expected.dtype, device=group.device)
        if to is None and group.size > 2 and expected.nbytes > ONE_PHASE_NBYTES:
            missing = _reduce_in_two_phases(group, flat, out.view(-1), reduction)
        else:
            missing = _reduce_in_one_phase(group, flat, out.view(-1), reduction, _wanted(group, to))
        result = _agreed(group, missing, fault, out if _wanted(group, to) else None)
    return settled(result)


def all_gather(
    group: Group, value: MemberValue, expected: TensorMetadata, *, to: Sequence[int] | None = None
) -> MemberValue:
    """The values of all members in the order of their ranks, along a new outermost dim; ``to`` as of `all_reduce`."""
    with group.guard(f"stack of {expected}"):
        flat, fault = _flat(group, value, expected)
        wanted = _wanted(group, to)
        shape = (group.size, *expected.shape)
        out = torch.empty(shape if wanted else (0, *shape), dtype=expected.dtype, device=group.device)
        into = out.view(group.size, -1) if wanted and expected.numel else None
        missing: list[int] = []
        for begin, end in _segments(expected.numel, expected.dtype.itemsize):
            place = _rows(group, end - begin, expected.dtype) if into is None else into[:, begin:end]
            missing = exchange(group, None if flat is None else flat[None, begin:end], place, wanted=wanted)
            if missing:
                break
        result = _agreed(group, missing, fault, out if wanted else None)
    return settled(result)


def reduce_scatter(group: Group, value: MemberValue, expected: TensorMetadata, reduction: str) -> MemberValue:
    """Part i of the reduced values for the member of rank i; dim 0 is cut into one part for each member, evenly."""

    def reduce(rows: torch.Tensor, begin: int, end: int) -> None:
        combine(reduction, rows, out.view(-1)[begin:end])

    with group.guard(f"scattered {reduction} of {expected}"):
        flat, fault = _flat(group, value, expected)
        shape = (expected.shape[0] // group.size, *expected.shape[1:])
        out = torch.empty(shape, dtype=expected.dtype, device=group.device)
        missing = _cross(group, flat, expected, reduce)
        result = _agreed(group, missing, fault, out)
    return settled(result)


def all_to_all(group: Group, value: MemberValue, expected: TensorMetadata) -> MemberValue:
    """Part j of every member's value for the member of rank j, put together in the order of the ranks.

    Dim 0 is cut evenly into as many parts as there are members; the result has the shape of the value.
    """

    def put(rows: torch.Tensor, begin: int, end: int) -> None:
        out.view(group.size, -1)[:, begin:end].copy_(rows)

    with group.guard(f"all-to-all of {expected}"):
        flat, fault = _flat(group, value, expected)
        out = torch.empty(expected.shape, dtype=expected.dtype, device=group.device)
        missing = _cross(group, flat, expected, put)
        result = _agreed(group, missing, fault, out)
    return settled(result)


def checked(
    value: MemberValue, expected: TensorMetadata, device: torch.device
) -> tuple[torch.Tensor | None, MemberValue]:
    """The value if it is as the script expects, else None; and what stands in place of the value, or None."""
    if not isinstance(value, torch.Tensor):
        return None, value
    if (tuple(value.shape), value.dtype, value.device.type) != (expected.shape, expected.dtype, device.type):
        there = f"{value.dtype} {list(value.shape)} on {value.device}"
        return None, CommunicationError(f"a worker has {there} where the script expects {expected}")
    return value, None


def _flat(group: Group, value: MemberValue, expected: TensorMetadata) -> tuple[torch.Tensor | None, MemberValue]:
    tensor, fault = checked(value, expected, group.device)
    return (None if tensor is None else tensor.detach().reshape(-1)), fault


def _wanted(group: Group, to: Sequence[int] | None) -> bool:
    return to is None or group.rank in to


def _segments(n: int, itemsize: int) -> list[tuple[int, int]]:
    """Bounds of the pieces in which ``n`` elements go; of no elements there is one, which carries the flag."""
    step = SEGMENT_NBYTES // itemsize
    return [(begin, min(begin + step, n)) for begin in range(0, max(n, 1), step)]


def _rows(group: Group, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Room for a row from each member; the next call gets the same memory."""
    nbytes = group.size * n * dtype.itemsize
    room: torch.Tensor | None = group.scratch.get("rows")
    if room is None or room.numel() < nbytes:
        room = group.scratch["rows"] = torch.empty(nbytes, dtype=torch.uint8, device=group.device)
    return room[:nbytes].view(dtype).view(group.size, n)


def _reduce_in_one_phase(
    group: Group, flat: torch.Tensor | None, out: torch.Tensor, reduction: str, wanted: bool
) -> list[int]:
    """Each member gets all values and reduces them."""
    for begin, end in _segments(out.numel(), out.itemsize):
        rows = _rows(group, end - begin, out.dtype)
        missing = exchange(group, None if flat is None else flat[None, begin:end], rows, wanted=wanted)
        if missing:
            return missing
        if wanted and end > begin:
            combine(reduction, rows, out[begin:end])
    return []


def _reduce_in_two_phases(group: Group, flat: torch.Tensor | None, out: torch.Tensor, reduction: str) -> list[int]:
    """Each member reduces a part of the values, and gives it to all."""
    for begin, end in _segments(out.numel(), out.itemsize):
        part = -(-(end - begin) // group.size)
        padding = part * group.size - (end - begin)
        rows = _rows(group, part, out.dtype)
        mine = None if flat is None else flat[begin:end]
        if mine is not None and padding:
            mine = torch.cat((mine, mine.new_zeros(padding)))
        missing = exchange(group, None if mine is None else mine.view(group.size, part), rows)
        if missing:
            return missing
        reduced = out.new_empty(part)
        combine(reduction, rows, reduced)
        exchange(group, reduced[None], rows if padding else out[begin:end].view(group.size, part))
        if padding:
            out[begin:end] = rows.view(-1)[: end - begin]
    return []


def _cross(
    group: Group, flat: torch.Tensor | None, expected: TensorMetadata, use: Callable[[torch.Tensor, int, int], None]
) -> list[int]:
    """Give part i to member i, and use what the others give, piece by piece."""
    part = expected.numel // group.size
    parts = None if flat is None else flat.view(group.size, part)
    for begin, end in _segments(part, expected.dtype.itemsize * group.size):
        rows = _rows(group, end - begin, expected.dtype)
        missing = exchange(group, None if parts is None else parts[:, begin:end], rows)
        if missing:
            return missing
        if end > begin:
            use(rows, begin, end)
    return []


def _agreed(group: Group, missing: list[int], fault: MemberValue, out: torch.Tensor | None) -> MemberValue:
    """The result; if values are missing, what the first member without one has in its place."""
    if not missing or group.size == 1:
        return fault if missing else out
    first = missing[0]
    raw = pickle.dumps(fault) if group.rank == first else b""
    lengths = torch.empty((group.size, 1), dtype=torch.int64, device=group.device)
    group.swap(torch.full_like(lengths, len(raw)).view(torch.uint8), lengths.view(torch.uint8))
    outgoing = torch.zeros((group.size, int(lengths[first, 0])), dtype=torch.uint8, device=group.device)
    if raw:
        outgoing[:] = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(group.device)
    incoming = torch.empty_like(outgoing)
    group.swap(outgoing, incoming)
    # It comes from a worker of the same script, over a connection of the engine's own.
    return pickle.loads(incoming[first].cpu().numpy().tobytes())


def settled(result: MemberValue) -> MemberValue:
    """What a collective returns. An error on which all members agree is raised on all; the group stays usable."""
    if isinstance(result, CommunicationError):
        raise result
    return result


class _Stages:
    """The blocks of one member, used in turn.

    Two are enough, and no member has to say when it has read. Messages of an exchange reach a worker only after all
    members have begun it. By then they have ended the exchange before, and no longer read what was written for that.
    """

    def __init__(self) -> None:
        self._stages = (StagingBlock(), StagingBlock())
        self.peers = Peers()
        self.turn = 0

    def next(self) -> StagingBlock:
        self.turn = 1 - self.turn
        return self._stages[self.turn]


def exchange(group: Group, rows: torch.Tensor | None, out: torch.Tensor, *, wanted: bool = True) -> list[int]:
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
    # All members have to choose the same way, so the choice cannot depend on `count`, which differs between them.
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
