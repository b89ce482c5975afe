"""Which device of a worker the script's tensors lie on: the one place that knows of the devices of workers.

The script says ``cuda``, or ``cuda:0``, as if there were one GPU. Each worker has its own: its current device.
"""

from __future__ import annotations

import torch


def choose(rank: int) -> None:
    """Give a worker its GPU, where there are any: those that the process sees go round by rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())


def local(device: torch.device) -> torch.device:
    """Where on this worker lies what the script calls so."""
    return torch.device(device.type)
