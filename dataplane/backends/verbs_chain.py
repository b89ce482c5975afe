"""Work requests, made once and posted as often as needed: rows and epoch words as chains for a queue pair.

A *program* is what one transfer does: a few *chunks*, each a chain of work requests that is posted by one call and of
which only the last one completes. A chunk fills no more than half of a queue, so that the next one can be posted while
it runs.
"""

import itertools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataplane.backends.base import Remote
from dataplane.backends.verbs_device import Device, pyverbs
from dataplane.backends.verbs_memory import Memory, Words
from dataplane.layout import Rows

_LOCAL, _REMOTE, _RUN, _KEY, _NDIM, _DIMS = range(6)  # columns of rows, see rows.h
_WORD = 8

Piece = tuple[int, int, int]  # address, bytes, local key


@dataclass(slots=True)
class Request:
    """One RDMA READ or WRITE: a contiguous range of the peer, scattered to or gathered from pieces of this side."""

    remote: int
    rkey: int
    nbytes: int
    pieces: list[Piece]
    write: bool


class Chunk:
    """A chain of work requests.

    Attributes:
        first: Its head, to be posted.
        last: Its end, the only one that completes.
        count: Its length.
    """

    __slots__ = ("__weakref__", "count", "first", "last")

    def __init__(self, device: Device, requests: Sequence[Request]) -> None:
        made = [_work_request(device, request) for request in requests]
        for this, following in itertools.pairwise(made):
            this.next_wr = following
        self.first, self.last, self.count = made[0], made[-1], len(made)
        self.last.send_flags = device.enums.IBV_SEND_SIGNALED
        # pyverbs allocates their lists of pieces and leaves it to its user to free them.
        weakref.finalize(self, _free, made).atexit = False


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Program:
    """Everything that a transfer posts.

    Attributes:
        chunks: To be posted in this order.
        probe: Chunks that only fetch the words.
        words: Where the words arrive.
        memories: The local memory that it uses, which must stay open.
    """

    chunks: tuple[Chunk, ...]
    probe: tuple[Chunk, ...]
    words: Words
    memories: tuple[Memory, ...]

    @property
    def valid(self) -> bool:
        """Whether its local memory is still registered."""
        return all(memory.open for memory in self.memories)


def compile_program(
    device: Device,
    rows: Rows,
    remotes: Sequence[Remote],
    memories: tuple[Memory, ...],
    words: Words,
    *,
    to_remote: bool,
) -> Program:
    """Chains for rows whose `key` column counts `remotes`, and for the word of each remote.

    The words are fetched behind the data: a reliable connection executes requests in that order.
    """
    data = list(_requests(device, rows, remotes, memories, to_remote))
    fetch = [
        Request(remote.word, remote.key.page, _WORD, [(words.address + at * _WORD, _WORD, words.lkey)], False)
        for at, remote in enumerate(remotes)
    ]
    return Program(_chunks(device, data + fetch), _chunks(device, fetch), words, memories)


def _chunks(device: Device, requests: list[Request]) -> tuple[Chunk, ...]:
    most = max(1, device.depth // 2)
    return tuple(Chunk(device, requests[at : at + most]) for at in range(0, len(requests), most))


def _requests(
    device: Device, rows: Rows, remotes: Sequence[Remote], memories: tuple[Memory, ...], write: bool
) -> Iterator[Request]:
    """The fewest requests for the rows: what is contiguous at the peer is joined, however scattered it is here."""
    find = _finder(memories)
    present: Request | None = None
    for local, remote, nbytes, key in _segments(rows, device.message_bytes):
        rkey = remotes[key].key.memory
        while nbytes:
            # Neighbours that were allocated apart are registered apart, even where a row runs across both.
            memory = find(local)
            part = min(nbytes, memory.address + memory.nbytes - local)
            piece = (local, part, memory.lkey)
            if (
                present is not None
                and present.rkey == rkey
                and present.remote + present.nbytes == remote
                and len(present.pieces) < device.gather
                and present.nbytes + part <= device.message_bytes
            ):
                present.pieces.append(piece)
                present.nbytes += part
            else:
                if present is not None:
                    yield present
                present = Request(remote, rkey, part, [piece], write)
            local, remote, nbytes = local + part, remote + part, nbytes - part
    if present is not None:
        yield present


def _finder(memories: tuple[Memory, ...]) -> Callable[[int], Memory]:
    """Which memory an address lies in."""
    ordered = sorted(memories, key=lambda memory: memory.address)
    starts = [memory.address for memory in ordered]

    def find(address: int) -> Memory:
        at = bisect_right(starts, address) - 1
        while ordered[at].address + ordered[at].nbytes <= address:
            at -= 1  # a shorter one that overlaps the one that is meant
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
    """Addresses of the runs of a row, on either side, in order."""
    locals_, remotes = row[_LOCAL : _LOCAL + 1], row[_REMOTE : _REMOTE + 1]
    for dim in range(int(row[_NDIM])):
        count, local_stride, remote_stride = row[_DIMS + 3 * dim : _DIMS + 3 * dim + 3]
        steps = np.arange(count)
        locals_ = np.add.outer(locals_, steps * local_stride).ravel()
        remotes = np.add.outer(remotes, steps * remote_stride).ravel()
    return locals_, remotes


def _work_request(device: Device, request: Request) -> Any:
    wr = pyverbs("wr")
    pieces = [wr.SGE(*piece) for piece in request.pieces]
    opcode = device.enums.IBV_WR_RDMA_WRITE if request.write else device.enums.IBV_WR_RDMA_READ
    made = wr.SendWR(opcode=opcode, num_sge=len(pieces), sg=pieces, send_flags=0)
    made.set_wr_rdma(request.rkey, request.remote)
    for piece in pieces:
        piece.close()  # the request holds a copy
    return made


def _free(made: Iterable[Any]) -> None:
    for request in made:
        request.close()
