"""What ranks run in the tests of failures: FSDP2 over one axis of a device mesh, tensor parallelism over the other."""

import os
import signal
from collections.abc import Callable
from typing import Any

RATE = 0.1
WIDTH = 8
BATCH = 8
SEED = 7
LARGE = 16 << 20
"""Elements of a tensor that takes a while on its way."""


def _raise() -> None:
    raise ValueError("this rank fails")


FAULTS: dict[str, Callable[[], None]] = {"raise": _raise, "kill": lambda: os.kill(os.getpid(), signal.SIGKILL)}


def _model(fault: Callable[[], None] | None) -> Any:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, fault: Callable[[], None] | None = None) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, 2 * WIDTH)
            self.down = nn.Linear(2 * WIDTH, WIDTH)
            self._fault = fault

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.up(x).relu()
            if self._fault is not None:
                self._fault()
            return x + self.down(hidden)

    torch.manual_seed(SEED)
    return nn.Sequential(Block(), Block(fault))


def _data() -> Any:
    import torch

    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(SEED))


def loss_alone() -> float:
    """What the first loss is without any parallelism."""
    return float(_model(None)(_data()).square().mean().detach())


def train(steps: int, *, failing: int = -1, how: str = "raise") -> list[float]:
    """Train on four ranks; one of them may fail in the middle of the second forward pass.

    Returns:
        The losses, the same on all ranks.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    losses: list[float] = []

    def fault() -> None:
        if dist.get_rank() == failing and losses:
            FAULTS[how]()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "tensors"))
    model = _model(fault)
    for block in model:
        parallelize_module(block, mesh["tensors"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    data = _data().chunk(2)[mesh.get_local_rank("shards")]
    for _ in range(steps):
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total, group=mesh.get_group("shards"))
        losses.append(float(total) / 2)
    return losses


def reduce(moment: str, *, failing: int = -1) -> float:
    """Sum over all ranks; one may raise at a moment. What waits for it is another thing at each of them."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    def reached(now: str) -> None:
        if now == moment and int(os.environ["RANK"]) == failing:
            _raise()

    torch.set_num_threads(1)
    reached("before they meet")
    dist.init_process_group("gloo")
    reached("before a group is made")
    init_device_mesh("cpu", (2, 2))
    one = torch.ones(1)
    if moment == "while much is under way":
        large = torch.ones(LARGE)
        work = dist.all_reduce(large, async_op=True)
        reached(moment)
        work.wait()
    if moment == "before it sends":
        reached(moment)
        if failing >= 0 and dist.get_rank() != failing:
            dist.recv(one, failing)
    if moment == "and destroys its groups":
        try:
            reached(moment)
            dist.all_reduce(one)
        finally:
            dist.destroy_process_group()
        return 4.0
    if moment == "and others try again":
        reached(moment)
        for _ in range(3):
            try:
                dist.all_reduce(torch.ones(1))
            except RuntimeError:
                continue
    dist.all_reduce(one)
    return float(one)


def wait_for_what_cannot_be_aborted(seconds: float, *, bound_s: float) -> None:
    """Rank 1 raises while rank 0 waits in torch for something that no process group knows of."""
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.elastic.utils.store import get_all

    from skipper.control.api import spmd

    spmd.LEAVE_TIMEOUT_S = bound_s
    if os.environ["RANK"] == "1":
        _raise()
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=seconds))
    get_all(store, 0, "never set", 2)
