"""Actors of the tests of checkpoints between machines."""

import torch

from skipper import torchstore as ts
from skipper.control import Actor, ProcMesh, current_rank, endpoint

ROWS, COLUMNS = 96, 1024
TIMEOUT_S = 60.0


def rows_of(rank: int, seed: int) -> torch.Tensor:
    """What a rank has of the checkpoint."""
    made = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(ROWS, COLUMNS, generator=made)


class Rank(Actor):
    """Puts one part of a checkpoint, and reads all of it."""

    @endpoint
    async def initialize(self, volumes: ProcMesh) -> None:
        await ts.initialize(strategy=ts.LocalRankStrategy(), mesh=volumes, copies=2)

    @endpoint
    async def put(self, seed: int, count: int) -> int:
        rank = current_rank().rank
        state = {f"rows of {rank}": rows_of(rank, seed)}
        return await ts.put_state_dict(state, "checkpoint", publisher=(rank, count), timeout=TIMEOUT_S)

    @endpoint
    async def differs(self, seed: int, count: int) -> list[str]:
        """Read the whole checkpoint into zeros; the names of what is not, bit for bit, what was put."""
        expected = {f"rows of {rank}": rows_of(rank, seed) for rank in range(count)}
        into = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        await ts.get_state_dict("checkpoint", into, timeout=TIMEOUT_S)
        return [name for name, tensor in expected.items() if not torch.equal(into[name], tensor)]

    @endpoint
    async def holders(self) -> tuple[tuple[str, ...], ...]:
        return (await ts.get_meta("checkpoint")).volumes

    @endpoint
    async def close(self) -> None:
        await ts.shutdown()
