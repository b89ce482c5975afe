"""The collectives of a group of workers: reductions, gathering, all-to-all.

Each function takes the group, this worker's value, and the metadata that the script expects of the value on every
member. The value is a tensor, or poison if the operation that should have made the tensor failed. A worker with poison
also takes part, so that nobody waits for it. The result on every member is then the poison of the lowest rank that has
some.

The script checks the arguments before it sends anything. Only a user's function that returns something other than it
promised can produce an unexpected value. Then all members raise a `CommunicationError`. They also raise one if a member
is gone or late.

All collectives use `exchange`, in which every worker sends every other one a row: elements of one dtype. A flag in the
same message says whether the sender has no value. Small rows travel inside the messages. Large rows within a host do
not: each worker copies its rows to a block of shared memory, the messages contain flags and handles, and each worker
reads its rows from the blocks of the others.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from skipper.tensor_engine.errors import CommunicationError
from skipper.tensor_engine.shared.metadata import TensorMetadata
from skipper.tensor_engine.shared.reductions import Rows, combine
from skipper.tensor_engine.worker.groups import Group
from skipper.tensor_engine.worker.staging import CARD_NBYTES, Peers, StagingBlock

MemberValue = Any
"""A tensor, or a picklable object in place of one that could not be made."""

SEGMENT_NBYTES = 16 << 20
"""Larger values are sent in pieces of this size: shared memory for them stays bounded, and in the caches."""
BUNDLE_NBYTES = 4 << 20
"""Values that are reduced together are bundled up to this size, and stay in the caches."""
ONE_PHASE_NBYTES = 64 << 10
"""Up to this size each member gets all values and reduces them: one message in place of two."""
STAGED_FROM_NBYTES = 64 << 10
"""From this size of a worker's data on, shared memory is faster than messages."""
_ALIGNMENT = 16  # of the rows in a message: no dtype needs more


def all_reduce(
    group: Group,
    value: MemberValue,
    expected: TensorMetadata,
    reduction: str,
    *,
    to: Sequence[int] | None = None,
    into: torch.Tensor | None = None,
) -> MemberValue:
    """The values of all members reduced to one of the same shape.

    Args:
        group: this worker and the others.
        value: of this worker.
        expected: metadata of the values.
        reduction: any of `reductions` but ``"stack"``.
        to: the ranks that need the result, None for all; the others get None.
        into: a tensor of that shape and dtype to write the result into, which may be the value.

    Returns:
        ``into``, or a new contiguous tensor.
    """
    with group.guard(f"{reduction} of {expected}"):
        flat, fault = _flat(group, value, expected)
        out = _room_for_result(group, expected, into)
        if to is None:
            missing = _reduce(group, flat, out.view(-1), reduction)
        else:
            missing = _reduce_in_one_phase(group, flat, out.view(-1), reduction, _wanted(group, to))
        result = _agreed(group, missing, fault, out if _wanted(group, to) else None)
    return _delivered(settled(result), into)


def all_reduce_together(
    group: Group,
    values: Sequence[MemberValue],
    expected: Sequence[TensorMetadata],
    reduction: str,
    *,
    into: Sequence[torch.Tensor | None],
) -> list[MemberValue]:
    """`all_reduce` of several values; small ones are bundled. No target shares memory with the value of another.

    Returns:
        For each value what `all_reduce` returns, or the error that it raises.
    """
    results: list[MemberValue] = []
    for begin, end in _bundles(expected):
        part = slice(begin, end)
        reduced: Sequence[MemberValue] | None = None
        if end - begin > 1:
            try:
                reduced = _reduce_as_one(group, values[part], expected[part], reduction, into[part])
            except CommunicationError as error:
                reduced = [error] * (end - begin)
        if reduced is None:
            each = zip(values[part], expected[part], into[part], strict=True)
            reduced = [_reduce_one(group, value, meta, reduction, target) for value, meta, target in each]
        results += reduced
    return results


def all_gather(
    group: Group, value: MemberValue, expected: TensorMetadata, *, to: Sequence[int] | None = None
) -> MemberValue:
    """The values of all members in rank order, along a new outermost dim; ``to`` as for `all_reduce`."""
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
    """Part j of every member's value for the member of rank j, concatenated in rank order.

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


def _bundles(expected: Sequence[TensorMetadata]) -> Iterator[tuple[int, int]]:
    """Bounds of the bundles: consecutive values of one dtype, and not too large."""
    begin, nbytes = 0, 0
    for end, meta in enumerate(expected):
        if end > begin and (meta.dtype != expected[begin].dtype or nbytes + meta.nbytes > BUNDLE_NBYTES):
            yield begin, end
            begin, nbytes = end, 0
        nbytes += meta.nbytes
    if len(expected) > begin:
        yield begin, len(expected)


def _reduce_one(
    group: Group, value: MemberValue, expected: TensorMetadata, reduction: str, into: torch.Tensor | None
) -> MemberValue:
    """`all_reduce`, or the error that it raises."""
    try:
        return all_reduce(group, value, expected, reduction, into=into)
    except CommunicationError as error:
        return error


def _reduce_as_one(
    group: Group,
    values: Sequence[MemberValue],
    expected: Sequence[TensorMetadata],
    reduction: str,
    into: Sequence[torch.Tensor | None],
) -> list[MemberValue] | None:
    """Reduce values of one dtype in one exchange; None if a member lacks one of them."""
    dtype, sizes = expected[0].dtype, [meta.numel for meta in expected]
    n = sum(sizes)
    with group.guard(f"{reduction} of {len(values)} tensors of {dtype}"):
        found = [_flat(group, value, meta)[0] for value, meta in zip(values, expected, strict=True)]
        flats = [flat for flat in found if flat is not None]
        is_whole = len(flats) == len(found)
        if _takes_two_phases(group, n * dtype.itemsize):
            room = _room(group, "bundle", n, dtype)
            mine = torch.cat(flats, out=room) if is_whole else None
            if _reduce_in_two_phases(group, mine, room, reduction):
                return None
            pieces: list[Rows] = [piece[None] for piece in torch.split(room, sizes)]
        else:
            rows = _rows(group, n, dtype)
            if exchange(group, flats if is_whole else None, rows, has_own=True):
                return None
            pieces = [_with_own(group, *each) for each in zip(torch.split(rows, sizes, 1), flats, strict=True)]
        return [_combined(group, reduction, *each) for each in zip(pieces, expected, into, strict=True)]


def _combined(
    group: Group, reduction: str, rows: Rows, expected: TensorMetadata, into: torch.Tensor | None
) -> torch.Tensor:
    """The rows reduced into a tensor, or into a new one; a single row is the result."""
    out = _room_for_result(group, expected, into)
    if len(rows) == 1:
        out.view(-1).copy_(rows[0])
    elif expected.numel:
        combine(reduction, rows, out.view(-1))
    delivered: torch.Tensor = _delivered(out, into)
    return delivered


def checked(
    value: MemberValue, expected: TensorMetadata, device: torch.device
) -> tuple[torch.Tensor | None, MemberValue]:
    """The value if it is as the script expects, else None; and the object in place of the value, or None."""
    if not isinstance(value, torch.Tensor):
        return None, value
    if (tuple(value.shape), value.dtype, value.device.type) != (expected.shape, expected.dtype, device.type):
        there = f"{value.dtype} {list(value.shape)} on {value.device}"
        return None, CommunicationError(f"a worker has {there} where the script expects {expected}")
    return value, None


def _room_for_result(group: Group, expected: TensorMetadata, into: torch.Tensor | None) -> torch.Tensor:
    """The target memory of a result, if it can be written there directly, else new memory."""
    if (
        into is not None
        and (tuple(into.shape), into.dtype, into.device.type) == (expected.shape, expected.dtype, expected.device.type)
        and into.is_contiguous()
        and not into.is_conj()
        and not into.is_neg()
    ):
        return into.detach()
    return torch.empty(expected.shape, dtype=expected.dtype, device=group.device)


def _delivered(result: MemberValue, into: torch.Tensor | None) -> MemberValue:
    """A result from such memory, copied to its target if needed."""
    if into is None or not isinstance(result, torch.Tensor) or result.data_ptr() == into.data_ptr():
        return result
    return into.copy_(result)


def _flat(group: Group, value: MemberValue, expected: TensorMetadata) -> tuple[torch.Tensor | None, MemberValue]:
    tensor, fault = checked(value, expected, group.device)
    return (None if tensor is None else tensor.detach().reshape(-1)), fault


def _wanted(group: Group, to: Sequence[int] | None) -> bool:
    return to is None or group.rank in to


def _segments(n: int, itemsize: int) -> list[tuple[int, int]]:
    """Bounds of the pieces of ``n`` elements; for no elements there is one piece, which carries the flag."""
    step = SEGMENT_NBYTES // itemsize
    return [(begin, min(begin + step, n)) for begin in range(0, max(n, 1), step)]


def _rows(group: Group, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a row from each member; the next call gets the same memory."""
    return _room(group, "rows", group.size * n, dtype).view(group.size, n)


def _room(group: Group, name: str, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for elements; the next call with this name gets the same memory."""
    nbytes = n * dtype.itemsize
    room: torch.Tensor | None = group.scratch.get(name)
    if room is None or room.numel() < nbytes:
        room = group.scratch[name] = torch.empty(nbytes, dtype=torch.uint8, device=group.device)
    return room[:nbytes].view(dtype)


def _reduce(group: Group, flat: torch.Tensor | None, out: torch.Tensor, reduction: str) -> list[int]:
    """Reduce for all members; ``out`` may be the memory of ``flat``.

    Returns:
        The ranks that had no value.
    """
    if _takes_two_phases(group, out.nbytes):
        return _reduce_in_two_phases(group, flat, out, reduction)
    return _reduce_in_one_phase(group, flat, out, reduction, wanted=True)


def _takes_two_phases(group: Group, nbytes: int) -> bool:
    return group.size > 2 and nbytes > ONE_PHASE_NBYTES


def _reduce_in_one_phase(
    group: Group, flat: torch.Tensor | None, out: torch.Tensor, reduction: str, wanted: bool
) -> list[int]:
    """Each member gets all values and reduces them."""
    for begin, end in _segments(out.numel(), out.itemsize):
        rows = _rows(group, end - begin, out.dtype)
        mine = None if flat is None else flat[begin:end]
        missing = exchange(group, None if mine is None else mine[None], rows, wanted=wanted, has_own=True)
        if missing:
            return missing
        if wanted and mine is not None and end > begin:
            combine(reduction, _with_own(group, rows, mine), out[begin:end])
    return []


def _with_own(group: Group, rows: torch.Tensor, mine: torch.Tensor) -> Rows:
    """All rows in order, given rows without this member's own."""
    if group.size == 2:
        return [mine, rows[1]] if group.rank == 0 else [rows[0], mine]
    rows[group.rank].copy_(mine)
    return rows


def _reduce_in_two_phases(group: Group, flat: torch.Tensor | None, out: torch.Tensor, reduction: str) -> list[int]:
    """Each member reduces a part of the values, and sends it to all."""
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
    """Send part i to member i, and use the parts from the others, piece by piece."""
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
    """The result; if values are missing, the object that the first member without one has in its place."""
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
    """Return a collective's result. An error on which all members agree is raised on all; the group stays usable."""
    if isinstance(result, CommunicationError):
        raise result
    return result


class _Stages:
    """The blocks of one member, used in turn.

    Two are enough, and no member has to say when it has read. Messages of an exchange reach a worker only after all
    members have begun it. By then they have ended the previous exchange, and no longer read its data.
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
    rows: torch.Tensor | Sequence[torch.Tensor] | None,
    out: torch.Tensor,
    *,
    wanted: bool = True,
    has_own: bool = False,
) -> list[int]:
    """Send each member a row and get one from each. Called under `Group.guard`, by all members.

    Args:
        group: this worker and the others.
        rows: the data to send: row i of shape (size, n) goes to member i; with shape (1, n), or several tensors with
            one dim and n elements together, all get the same. None if this worker has no value.
        out: row i gets the row from member i; of shape (size, n), the same n and dtype for all members; each row
            contiguous. Undefined if any member had no value.
        wanted: False if this worker does not need the rows: ``out`` is then undefined.
        has_own: whether this worker's own row need not be in ``out``.

    Returns:
        The ranks of the members that had no value.
    """
    n, size, nbytes = out.shape[1], group.size, out.shape[1] * out.itemsize
    count = size if rows is None else rows.shape[0] if isinstance(rows, torch.Tensor) else 1
    if size == 1:
        if rows is None:
            return [0]
        if not has_own:
            out.copy_(_one(rows))
        return []
    # All members must choose the same way, so the choice cannot depend on `count`, which differs between them.
    if group.same_host and nbytes * size >= STAGED_FROM_NBYTES:
        return _staged(group, rows, out, count, wanted, has_own)
    end = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    outgoing = torch.empty((size, end + _ALIGNMENT), dtype=torch.uint8, device=group.device)
    incoming = torch.empty_like(outgoing)
    outgoing[:, end] = rows is None
    if rows is not None and n:
        outgoing[:, :nbytes].view(out.dtype).copy_(_one(rows))
    group.swap(outgoing, incoming)
    missing = _ranks(incoming[:, end])
    if not missing and wanted and n:
        out.copy_(incoming[:, :nbytes].view(out.dtype))
    return missing


def _one(rows: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    return rows if isinstance(rows, torch.Tensor) else torch.cat(list(rows))


def _staged(
    group: Group,
    rows: torch.Tensor | Sequence[torch.Tensor] | None,
    out: torch.Tensor,
    count: int,
    wanted: bool,
    has_own: bool,
) -> list[int]:
    stages = group.scratch.get("exchange")
    if stages is None:
        stages = group.scratch["exchange"] = _Stages()
    stage, nbytes, rank = stages.next(), out.shape[1] * out.itemsize, group.rank
    if isinstance(rows, torch.Tensor):
        stage.room(count * nbytes).view(out.dtype).view(count, out.shape[1]).copy_(rows)
    elif rows is not None:
        torch.cat(list(rows), out=stage.room(nbytes).view(out.dtype))
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
    if not has_own:
        out[rank].copy_(_one(rows).view(count, -1)[0 if count == 1 else rank])
    for read in reads:
        read.get()
    return []


def _ranks(flags: torch.Tensor) -> list[int]:
    return [rank for rank, flag in enumerate(flags.tolist()) if flag]
