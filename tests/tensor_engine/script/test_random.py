"""Random numbers on the workers, against torch's generators in this process."""

from collections.abc import Iterator

import pytest
import torch

from skipper.control import ProcMesh
from skipper.tensor_engine import NoActiveMeshError, call_on_shard_and_fetch, inspect, remote
from skipper.tensor_engine.script import random
from tests.tensor_engine.conftest import PATIENCE_S


@pytest.fixture(autouse=True)
def as_before(procs: ProcMesh) -> Iterator[None]:
    state = random.get_state(mesh=procs)
    yield
    random.set_state(state)
    with procs.activate():
        remote(torch.use_deterministic_algorithms)(False)


def at(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [inspect(tensor, gpus=rank, timeout=PATIENCE_S) for rank in range(2)]


def drawn(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(3, generator=generator), torch.randn(4, generator=generator)]


def test_ranks_draw_different_numbers_unless_they_are_asked_not_to(procs: ProcMesh) -> None:
    with procs.activate():
        first, second = at(torch.rand(5))
        assert not torch.equal(first, second)
        random.manual_seed(7)
        results = [torch.rand(3), torch.randn(4)]
        random.manual_seed(7, same=True)
        alike = [torch.rand(3), torch.randn(4)]
    for rank in range(2):
        for found, wanted in zip(results, drawn(7 + rank), strict=True):
            torch.testing.assert_close(at(found)[rank], wanted)
        for found, wanted in zip(alike, drawn(7), strict=True):
            torch.testing.assert_close(at(found)[rank], wanted)


def test_seeds_may_be_tensors_and_slices_count_from_their_first_rank(procs: ProcMesh) -> None:
    random.manual_seed(10 * procs.rank_tensor("gpus"))
    with procs.activate():
        result = torch.rand(3)
    assert [torch.equal(each, drawn(10 * rank)[0]) for rank, each in enumerate(at(result))] == [True, True]
    second = procs.slice(gpus=1)
    random.manual_seed(4, mesh=second)
    with second.activate():
        result = torch.rand(3)
    torch.testing.assert_close(inspect(result, timeout=PATIENCE_S), drawn(4)[0])
    with pytest.raises(NoActiveMeshError):
        random.manual_seed(1)


def test_states_are_kept_and_put_back(procs: ProcMesh) -> None:
    with procs.activate():
        state = random.get_state()
        first = torch.rand(3)
        torch.rand(2)
        random.set_state(state)
        again = torch.rand(3)
        random.set_state(random.new_state(procs.rank_tensor("gpus") + 4))
        fresh = torch.rand(3)
    assert state.dtype is torch.uint8
    for rank in range(2):
        torch.testing.assert_close(at(first)[rank], at(again)[rank])
        torch.testing.assert_close(at(fresh)[rank], drawn(4 + rank)[0])


def test_dropout_repeats_after_make_deterministic(procs: ProcMesh) -> None:
    dropout = torch.nn.Dropout(0.5)
    with procs.activate():
        x = torch.ones(64)
        results = []
        for _ in range(2):
            random.make_deterministic(3)
            results.append(dropout(x))
        asked = call_on_shard_and_fetch("torch.are_deterministic_algorithms_enabled", shard={"gpus": 1})
    first, second = (at(result) for result in results)
    torch.testing.assert_close(first, second)
    assert not torch.equal(first[0], first[1])
    torch.manual_seed(4)
    torch.testing.assert_close(first[1], dropout(torch.ones(64)))
    assert asked.get(PATIENCE_S) is True
