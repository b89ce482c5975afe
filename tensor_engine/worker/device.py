"""The device of a worker for the script's tensors, and how its threads wait for each other's work there.

The script says ``cuda``, or ``cuda:0``, as if there were one GPU. Each worker has its own: its current device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree


def choose(rank: int) -> None:
    """Give a worker its GPU, if there are any: ranks take the GPUs that the process sees in turn."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())


def identity() -> str:
    """Identifies the GPU of this worker: equal for workers that share it, on any host."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def use_own_cuda_stream() -> None:
    """Give this thread, which runs a stream of the script, a CUDA stream of its own, if there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]


def local(device: torch.device) -> torch.device:
    """The device of this worker for a device of the script."""
    return torch.device(device.type)


def mark() -> torch.cuda.Event | None:
    """An event after what this thread has issued to its GPU; None if no GPU is in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def follow(event: torch.cuda.Event | None) -> None:
    """Make this thread's later GPU work wait for the event of another thread."""
    if event is not None:
        event.wait()


def move_to(event: torch.cuda.Event | None) -> None:
    """`follow` in a thread that is not a worker's: the GPU of the event becomes its current one."""
    if event is not None:
        torch.cuda.set_device(event.device)
        event.wait()


def adopt(result: Any) -> None:
    """Keep the memory of tensors of another thread until this thread's work on them is done."""
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            leaf.record_stream(torch.cuda.current_stream(leaf.device))
