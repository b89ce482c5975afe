"""Work requests, made once and posted any number of times: rows and epoch words as chains for queue pairs.

A *program* is one transfer: for each rail that it uses, a few *chains* of work requests. One call posts a chain, and
only its last request completes. A chain fills at most half of a queue, so that the next one can be posted while it
runs.
"""

import itertools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skipper.dataplane.backends.base import Remote
from skipper.dataplane.backends.verbs.device import Device, pyverbs
from skipper.dataplane.backends.verbs.memory import RegisteredMemory, WordRoom, Words
from skipper.dataplane.layout import Rows
from skipper.dataplane.operation import Atomic, AtomicKind

STRIPE_BYTES = 2 << 20
"""From this size on a transfer is divided among all rails; smaller ones take one rail each, in turn."""

_LOCAL, _REMOTE, _RUN, _KEY, _NDIM, _DIMS = range(6)  # columns of rows, see rows.h
_WORD = 8

Piece = tuple[int, int, tuple[int, ...]]  # address, bytes, local keys


@dataclass(slots=True)
class WorkRequest:
    """One RDMA READ or WRITE: a contiguous range of the peer, scattered to or gathered from pieces of this side.

    Attributes:
        remote: Where the range begins.
        rkeys: The peer's keys, one per rail.
        nbytes: Its length.
        pieces: Of this side.
        write: Whether it is a WRITE.
        atomic: The atomic operation instead, if it is one word.
    """

    remote: int
    rkeys: tuple[int, ...]
    nbytes: int
    pieces: list[Piece]
    write: bool = False
    atomic: Atomic | None = None


class RequestChain:
    """A chain of work requests.

    Attributes:
        first: Its head, to be posted.
        last: Its end, the only one that completes.
        count: Its length.
    """

    __slots__ = ("__weakref__", "count", "first", "last")

    def __init__(self, device: Device, rail: int, requests: Sequence[WorkRequest]) -> None:
        made = [_send_request(device, rail, request) for request in requests]
        for this, following in itertools.pairwise(made):
            this.next_wr = following
        self.first, self.last, self.count = made[0], made[-1], len(made)
        self.last.send_flags = device.enums.IBV_SEND_SIGNALED
        # pyverbs allocates their lists of pieces, and its user must free them.
        weakref.finalize(self, _free, made).atexit = False


Phase = dict[int, tuple[RequestChain, ...]]
"""Chains that may be posted together, by their rail."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class VerbsProgram:
    """Everything that a transfer posts.

    Attributes:
        data: The transfer itself; on each of its rails the epoch words follow.
        probe: Fetches only the words, on the first of these rails.
        words: Where the words arrive, rail by rail; for an atomic operation, its result comes last.
        memories: The local memory that it uses, which must stay registered.
        sole: The rail and the chain, if the transfer is only one chain.
    """

    data: Phase
    probe: Phase
    words: Words
    memories: tuple[RegisteredMemory, ...]
    sole: tuple[int, RequestChain] | None = None

    @property
    def valid(self) -> bool:
        """Whether its local memory is still registered."""
        return all(memory.open for memory in self.memories)


def compile_program(
    devices: Sequence[Device],
    rails: Sequence[int],
    rows: Rows,
    remotes: Sequence[Remote],
    memories: tuple[RegisteredMemory, ...],
    room: WordRoom,
    *,
    to_remote: bool,
    turn: int,
) -> VerbsProgram:
    """Chains for rows whose `key` column counts `remotes`, and for the word of each remote.

    Every rail fetches the words after its own data: a reliable connection executes requests in order, but two
    connections are independent.

    Args:
        devices: Of all rails of this process.
        rails: The rails to use.
        rows: What to copy.
        remotes: The remote registrations of the rows.
        memories: The local memory of the rows.
        room: For the words.
        to_remote: Whether to write.
        turn: The number of this program, so that small ones take turns on the rails.

    Raises:
        RegistrationError: There is no room for the words.
    """
    limit = min(devices[rail].message_bytes for rail in rails)
    gather = min(devices[rail].gather for rail in rails)
    requests = list(_requests(rows, remotes, memories, limit, gather, to_remote))
    if len(rails) > 1 and sum(request.nbytes for request in requests) >= STRIPE_BYTES:
        used = rails[: len(requests)]
    else:
        used = (rails[turn % len(rails)],)
    words = room.take(len(remotes) * len(used))
    data: Phase = {}
    for at, rail in enumerate(used):
        fetch = _fetch(remotes, words, at * len(remotes))
        data[rail] = _chains(devices[rail], rail, requests[at :: len(used)] + fetch)
    first = data[used[0]]
    sole = (used[0], first[0]) if len(used) == len(first) == 1 else None
    return VerbsProgram(data, _probe(devices, used[0], remotes, words), words, memories, sole)


def compile_atomic(device: Device, remote: Remote, address: int, atomic: Atomic, room: WordRoom) -> VerbsProgram:
    """A chain for one atomic operation; its result is the second word.

    Always on rail 0: operations through two devices of the owner would not be atomic with each other.

    Raises:
        RegistrationError: There is no room for the words.
    """
    words = room.take(2)
    result = (words.address + _WORD, _WORD, words.lkeys)
    request = WorkRequest(address, remote.key.memory, _WORD, [result], atomic=atomic)
    data = {0: _chains(device, 0, [request, *_fetch((remote,), words, 0)])}
    return VerbsProgram(data, _probe((device,), 0, (remote,), words), words, ())


def reuse_atomic(program: VerbsProgram, remote: Remote, address: int, atomic: Atomic) -> VerbsProgram:
    """Set other operands in a program of `compile_atomic` that has run, for the same word and kind of operation."""
    _set_operands(program.data[0][0].first, remote.key.memory[0], address, atomic)
    return program


def _probe(devices: Sequence[Device], rail: int, remotes: Sequence[Remote], words: Words) -> Phase:
    return {rail: _chains(devices[rail], rail, _fetch(remotes, words, 0))}


def _fetch(remotes: Sequence[Remote], words: Words, first: int) -> list[WorkRequest]:
    """Requests for the words of remotes; they arrive from the index `first` on."""
    return [
        WorkRequest(remote.word, remote.key.page, _WORD, [(words.address + at * _WORD, _WORD, words.lkeys)])
        for at, remote in enumerate(remotes, first)
    ]


def _chains(device: Device, rail: int, requests: list[WorkRequest]) -> tuple[RequestChain, ...]:
    most = max(1, device.depth // 2)
    return tuple(RequestChain(device, rail, requests[at : at + most]) for at in range(0, len(requests), most))


def _requests(
    rows: Rows, remotes: Sequence[Remote], memories: tuple[RegisteredMemory, ...], limit: int, gather: int, write: bool
) -> Iterator[WorkRequest]:
    """The fewest requests for the rows: ranges that are contiguous at the peer are joined, even if scattered here."""
    find = _finder(memories)
    present: WorkRequest | None = None
    for local, remote, nbytes, key in _segments(rows, limit):
        rkeys = remotes[key].key.memory
        while nbytes:
            # Neighbours that were allocated separately are registered separately, even if a row covers both.
            memory = find(local)
            part = min(nbytes, memory.address + memory.nbytes - local)
            piece = (local - memory.address + memory.begin, part, memory.lkeys)
            if (
                present is not None
                and present.rkeys is rkeys
                and present.remote + present.nbytes == remote
                and len(present.pieces) < gather
                and present.nbytes + part <= limit
            ):
                present.pieces.append(piece)
                present.nbytes += part
            else:
                if present is not None:
                    yield present
                present = WorkRequest(remote, rkeys, part, [piece], write)
            local, remote, nbytes = local + part, remote + part, nbytes - part
    if present is not None:
        yield present


def _finder(memories: tuple[RegisteredMemory, ...]) -> Callable[[int], RegisteredMemory]:
    """A function that finds the memory of an address."""
    ordered = sorted(memories, key=lambda memory: memory.address)
    starts = [memory.address for memory in ordered]

    def find(address: int) -> RegisteredMemory:
        at = bisect_right(starts, address) - 1
        while ordered[at].address + ordered[at].nbytes <= address:
            at -= 1  # a shorter one that overlaps the right one
        return ordered[at]

    return find


def _segments(rows: Rows, most: int) -> Iterator[tuple[int, int, int, int]]:
    """(local, remote, bytes, key) of every contiguous run, none longer than `most`."""
    for row in rows:
        run, key = int(row[_RUN]), int(row[_KEY])
        if row[_NDIM] == 0 and run <= most:
            yield int(row[_LOCAL]), int(row[_REMOTE]), run, key
            continue
        locals_, remotes = _starts(row)
        for local, remote in zip(locals_.tolist(), remotes.tolist(), strict=True):
            for begin in range(0, run, most):
                yield local + begin, remote + begin, min(most, run - begin), key


def _starts(row: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Addresses of the runs of a row, on both sides, in order."""
    locals_, remotes = row[_LOCAL : _LOCAL + 1], row[_REMOTE : _REMOTE + 1]
    for dim in range(int(row[_NDIM])):
        count, local_stride, remote_stride = row[_DIMS + 3 * dim : _DIMS + 3 * dim + 3]
        steps = np.arange(count)
        locals_ = np.add.outer(locals_, steps * local_stride).ravel()
        remotes = np.add.outer(remotes, steps * remote_stride).ravel()
    return locals_, remotes


def _send_request(device: Device, rail: int, request: WorkRequest) -> Any:
    wr, e = pyverbs("wr"), device.enums
    pieces = [wr.SGE(address, nbytes, lkeys[rail]) for address, nbytes, lkeys in request.pieces]
    atomic = request.atomic
    if atomic is None:
        opcode = e.IBV_WR_RDMA_WRITE if request.write else e.IBV_WR_RDMA_READ
    elif atomic.kind is AtomicKind.FETCH_ADD:
        opcode = e.IBV_WR_ATOMIC_FETCH_AND_ADD
    else:
        opcode = e.IBV_WR_ATOMIC_CMP_AND_SWP
    made = wr.SendWR(opcode=opcode, num_sge=len(pieces), sg=pieces, send_flags=0)
    if atomic is None:
        made.set_wr_rdma(request.rkeys[rail], request.remote)
    else:
        _set_operands(made, request.rkeys[rail], request.remote, atomic)
    for piece in pieces:
        piece.close()  # the request holds a copy
    return made


def _set_operands(made: Any, rkey: int, address: int, atomic: Atomic) -> None:
    if atomic.kind is AtomicKind.FETCH_ADD:
        made.set_wr_atomic(rkey, address, atomic.operand)
    else:
        made.set_wr_atomic(rkey, address, atomic.compare, atomic.operand)


def _free(made: Iterable[Any]) -> None:
    for request in made:
        request.close()
