"""Two meshes of ranks for all tests of a module: two under FSDP2, and four under FSDP2 and tensor parallelism."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from skipper.control import this_host
from tests.torchstore.dcp.ranks import PATIENCE_S, Trainer

LIMIT_S = 120.0


def trainers(world_size: int) -> Iterator[Any]:
    """Ranks of one process group."""
    procs = this_host().spawn_procs(per_host={"gpus": world_size})
    ranks = procs.spawn("trainers", Trainer)
    timeout = timedelta(seconds=PATIENCE_S)
    store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False, timeout=timeout)
    ranks.join.call(store.port, world_size).get(timeout=LIMIT_S)
    yield ranks
    procs.stop().get(timeout=LIMIT_S)


@pytest.fixture(scope="module")
def _two() -> Iterator[Any]:
    yield from trainers(2)


@pytest.fixture(scope="module")
def _four() -> Iterator[Any]:
    yield from trainers(4)


@pytest.fixture
def two(_two: Any) -> Any:
    """Two ranks with a new model under FSDP2."""
    _two.build.call((2,), ("dp",)).get(timeout=LIMIT_S)
    return _two


@pytest.fixture
def four(_four: Any) -> Any:
    """Four ranks with a new model under FSDP2 and tensor parallelism."""
    _four.build.call((2, 2), ("dp", "tp")).get(timeout=LIMIT_S)
    return _four


def same_everywhere(states: Any, expected: dict[str, Any]) -> bool:
    """Whether every rank has the expected state, its tensors bit for bit."""
    return all(same(state, expected) for state in states.values())


def same(state: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether two flat state dicts are equal, their tensors bit for bit."""
    return state.keys() == expected.keys() and all(
        torch.equal(value, expected[name]) if isinstance(value, torch.Tensor) else value == expected[name]
        for name, value in state.items()
    )
