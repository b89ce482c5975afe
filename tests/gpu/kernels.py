"""Kernels that take long, for tests of what waits for them."""

import torch

_CYCLES_PER_S = 1.5e9  # of the clock of a GPU, which is between 1 and 2.5 GHz


def occupy(seconds: float = 0.3) -> None:
    """Keep the current stream busy for about so long."""
    torch.cuda._sleep(int(seconds * _CYCLES_PER_S))
