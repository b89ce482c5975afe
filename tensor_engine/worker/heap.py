"""The heap of a worker: values by number, and poison in place of values that could not be made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Poison:
    """Replaces a value whose operation failed, and everything that depends on it.

    Attributes:
        rank: where it failed: the rank in the worker's mesh of processes.
        instruction_stream: number of the instruction stream of the failed instruction.
        sequence: number of that instruction in its instruction stream.
        operation: the operation that failed.
        summary: type and message of the exception.
        traceback: of the worker, as text.
        step: the index of the instruction in a compiled program, if the failed instruction is a replay.
        is_lost: whether nothing has failed, but the process with the value was replaced.
    """

    rank: int
    instruction_stream: int
    sequence: int
    operation: str
    summary: str
    traceback: str
    step: int | None = None
    is_lost: bool = False


Heap = dict[int, Any]
"""Tensors, poison, and anything else that an instruction has made, by number."""

_heaps: dict[int, Heap] = {}


def heap_of(session: int) -> Heap:
    """The heap of a session in this process; all its streams share it."""
    return _heaps.setdefault(session, {})


def lose(session: int, rank: int, refs: Iterable[int]) -> None:
    """Put poison in place of the values of the process that this one has replaced, for that rank."""
    heap, poison = heap_of(session), Poison(rank, 0, rank, "the rejoin", "", "", is_lost=True)
    heap.update((ref, poison) for ref in refs)


def forget_heap(session: int) -> None:
    """Release everything that a session has in this process."""
    _heaps.pop(session, None)


def poison_storage(heap: Heap, tensor: torch.Tensor, poison: Poison) -> None:
    """Put poison in place of every value that shares the storage of ``tensor``."""
    storage = tensor.untyped_storage()._cdata
    # Other streams of this process use the heap at the same time. A list of its items would be made one by one.
    for ref, value in heap.copy().items():
        if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == storage and heap.get(ref) is value:
            heap[ref] = poison
