"""The heap of a worker, which its streams share."""

import gc
import itertools

import torch

from skipper.tensor_engine.worker.heap import Heap, Poison, poison_storage


def test_a_storage_is_poisoned_while_other_streams_use_the_heap() -> None:
    x = torch.ones(4)
    heap: Heap = {1: x, 2: x[1:], 3: torch.ones(4), **dict.fromkeys(range(10, 200))}
    poison, refs = Poison(0, 1, 1, "told to fail", "", ""), itertools.count(1000)

    def other_stream(phase: str, info: object) -> None:
        heap[next(refs)] = None  # the collector may let another thread run

    thresholds = gc.get_threshold()
    gc.callbacks.append(other_stream)
    gc.set_threshold(1)
    try:
        poison_storage(heap, x, poison)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(other_stream)
    assert heap[1] is heap[2] is poison
    assert heap[3].tolist() == [1] * 4
