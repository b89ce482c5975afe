"""`transfer`: a tensor from one worker to one other, or down a tree to several.

The sender does not wait for its readers. A small tensor is sent in one message, with a flag that says whether there is
one. A larger one is copied to a block of shared memory, and the message contains its handle. Each reader reads it from
there one-sidedly, even from another host, and then tells the sender; only then is the block used again. Each group has
two blocks, so a sender is at most two large tensors, or a few small ones, ahead of its slowest reader.
"""

from __future__ import annotations

import pickle
from collections import deque
from typing import Any

import torch

from skipper.tensor_engine.errors import CommunicationError
from skipper.tensor_engine.shared.metadata import TensorMetadata
from skipper.tensor_engine.worker.collectives import MemberValue, checked, settled
from skipper.tensor_engine.worker.groups import Group
from skipper.tensor_engine.worker.staging import CARD_NBYTES, Peers, StagingBlock

STAGED_FROM_NBYTES = 256 << 10
"""Size from which shared memory is faster than gloo's messages (`python -m tests.tensor_engine.transfers`)."""
_AHEAD = 4  # how many messages a sender posts before it waits until the oldest is taken
_HEADER_NBYTES = 16 + CARD_NBYTES
_DATA, _READ = 0, 1  # tags of gloo's messages


def transfer(group: Group, value: MemberValue, expected: TensorMetadata) -> MemberValue:
    """Send the value of the member of rank 0 to all others.

    With several readers the messages use a binomial tree; large tensors do not, since all read the same block.

    Args:
        group: this worker and the others, the sender first.
        value: the sender's value; that of readers is ignored.
        expected: metadata of the value.

    Returns:
        At a reader the sender's value: a contiguous new tensor, or the object in place of one. None at the sender.

    Raises:
        CommunicationError: a member is gone or late, or the value has another shape or dtype.
    """
    with group.guard(f"a transfer of {expected}"):
        post = group.scratch.get("post")
        if post is None:
            post = group.scratch["post"] = _Post(group)
        result = post.send(value, expected) if group.rank == 0 else post.receive(expected)
    return settled(result)


class _Post:
    """The state of one member between transfers: messages that have not been received yet, and the shared blocks."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._stages = (StagingBlock(), StagingBlock())
        self._reading: tuple[list[tuple[Any, torch.Tensor]], ...] = ([], [])
        self._turn = 0
        self._peers = Peers()
        self._parent, self._children = _tree(group.rank, group.size)

    def send(self, value: MemberValue, expected: TensorMetadata) -> MemberValue:
        """Send, as the first member."""
        group = self._group
        tensor, fault = checked(value, expected, group.device)
        if tensor is None:
            raw = torch.frombuffer(bytearray(pickle.dumps(fault)), dtype=torch.uint8).to(group.device)
            header = self._header(expected)
            header[0] = 1
            header[8:16] = torch.frombuffer(bytearray(raw.numel().to_bytes(8, "little")), dtype=torch.uint8)
            self._pass_on(header)
            self._pass_on(raw)
            return fault if isinstance(fault, CommunicationError) else None
        header = self._header(expected)
        if self._is_staged(expected):
            self._stage(tensor, header)
        elif expected.nbytes:
            payload = header[16 : 16 + expected.nbytes].view(expected.dtype).view(expected.shape)
            payload.copy_(tensor)
        self._pass_on(header)
        return None

    def receive(self, expected: TensorMetadata) -> MemberValue:
        """Receive, as a reader."""
        group = self._group
        header = self._header(expected)
        self._take(header)
        self._pass_on(header)
        if header[0].item():
            raw = torch.empty(int(header[8:16].view(torch.int64)), dtype=torch.uint8, device=group.device)
            self._take(raw)
            self._pass_on(raw)
            # It comes from a worker of the same script, over a connection of the engine's own.
            return pickle.loads(raw.cpu().numpy().tobytes())
        out = torch.empty(expected.shape, dtype=expected.dtype, device=group.device)
        if self._is_staged(expected):
            self._peers.read(0, self._turn, header[16:], 0, out, timeout_s=group.timeout_s).get()
            self._turn = 1 - self._turn
            self._post(torch.zeros(1, dtype=torch.uint8), 0, _READ)
        elif expected.nbytes:
            out.copy_(header[16 : 16 + expected.nbytes].view(expected.dtype).view(expected.shape))
        return out

    def _header(self, expected: TensorMetadata) -> torch.Tensor:
        nbytes = _HEADER_NBYTES if self._is_staged(expected) else 16 + expected.nbytes
        header = torch.empty(nbytes, dtype=torch.uint8, device=self._group.device)
        header[:16] = 0
        return header

    def _is_staged(self, expected: TensorMetadata) -> bool:
        return self._group.device.type == "cpu" and expected.nbytes >= STAGED_FROM_NBYTES

    def _stage(self, tensor: torch.Tensor, header: torch.Tensor) -> None:
        turn = self._turn
        self._turn = 1 - turn
        stage, reading = self._stages[turn], self._reading[turn]
        for work, _ in reading:
            work.wait()
        reading.clear()
        stage.room(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)
        header[16:] = stage.card
        for reader in range(1, self._group.size):
            told = torch.empty(1, dtype=torch.uint8)
            reading.append((self._group.backend.recv([told], reader, _READ), told))

    def _take(self, message: torch.Tensor) -> None:
        self._group.backend.recv([message], self._parent, _DATA).wait()

    def _pass_on(self, message: torch.Tensor) -> None:
        for child in self._children:
            self._post(message, child, _DATA)

    def _post(self, message: torch.Tensor, to: int, tag: int) -> None:
        """Send without waiting; the message stays unchanged until it is taken."""
        self._sent.append((self._group.backend.send([message], to, tag), message))
        while len(self._sent) > _AHEAD * max(len(self._children), 1):
            self._sent.popleft()[0].wait()


def _tree(rank: int, size: int) -> tuple[int, list[int]]:
    """Parent (of the root: itself) and children of a member in the binomial tree over ``size`` members with root 0."""
    lowest = rank & -rank if rank else 1 << size.bit_length()
    children = []
    step = 1
    while step < lowest:
        if rank + step < size:
            children.append(rank + step)
        step <<= 1
    return rank - (rank and lowest), children[::-1]
