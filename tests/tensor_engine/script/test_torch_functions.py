"""Functions of torch that no dispatch sees: seeds and states of generators, and what makes tensors of the script."""

import io
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from skipper.control import ProcMesh
from skipper.tensor_engine import LocalTensorError, Tensor, inspect, no_mesh, random, to_mesh
from tests.tensor_engine.conftest import PATIENCE_S


@pytest.fixture(autouse=True)
def as_before(procs: ProcMesh) -> Iterator[None]:
    state, here = random.get_states(mesh=procs), torch.get_rng_state()
    yield
    random.set_states(state)
    torch.set_rng_state(here)


def at(tensor: torch.Tensor) -> list[list[float]]:
    return [inspect(tensor, gpus=rank, timeout=PATIENCE_S).tolist() for rank in range(2)]


def drawn(seed: int) -> list[float]:
    numbers: list[float] = torch.rand(3, generator=torch.Generator().manual_seed(seed)).tolist()
    return numbers


def test_a_seed_is_that_of_every_rank_and_of_the_script(procs: ProcMesh) -> None:
    with procs.activate():
        assert torch.manual_seed(5) is torch.default_generator
        assert at(torch.rand(3)) == [drawn(5), drawn(5)]
        with no_mesh():
            assert torch.rand(3).tolist() == drawn(5)
        torch.seed()
        first, second = at(torch.rand(3))
        assert first != second
        torch.manual_seed(6)
    torch.manual_seed(7)  # where no mesh is active, of the script alone
    with procs.activate():
        assert at(torch.rand(3)) == [drawn(6), drawn(6)]


def test_states_that_are_kept_are_those_of_the_workers(procs: ProcMesh) -> None:
    here = torch.get_rng_state()
    with procs.activate():
        state = torch.get_rng_state()
        assert isinstance(state, Tensor)
        before = at(torch.rand(3))
        with torch.random.fork_rng():
            torch.manual_seed(1)
            assert at(torch.rand(3)) == [drawn(1), drawn(1)]
        after = at(torch.rand(3))
        torch.set_rng_state(state)
        assert at(torch.rand(3)) == before
        assert at(torch.rand(3)) == after
        torch.set_rng_state(torch.Generator().manual_seed(9).get_state())  # of the script, for all
        assert at(torch.rand(3)) == [drawn(9), drawn(9)]
    torch.set_rng_state(here)
    assert torch.equal(torch.get_rng_state(), here)


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("inside", [True, False])
def test_what_a_checkpoint_computes_again_has_the_same_mask(procs: ProcMesh, is_reentrant: bool, inside: bool) -> None:
    def dropped(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x * 3, 0.5)

    def run(how: Callable[..., torch.Tensor]) -> tuple[Any, ...]:
        torch.manual_seed(3)
        with procs.activate():
            torch.manual_seed(3)
            x = torch.ones(64, requires_grad=True)
            y = how(dropped, x)
            between = torch.rand(2)
            loss = y.sum()
        backward: AbstractContextManager[Any] = procs.activate() if inside else nullcontext()
        with backward:
            loss.backward()
        with procs.activate():
            after = torch.rand(4)
        assert x.grad is not None
        return at(y), at(x.grad), at(between), at(after), torch.get_rng_state().tolist()

    def again(function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(function, x, use_reentrant=is_reentrant)
        return result

    plain, checkpointed = run(lambda function, x: function(x)), run(again)
    assert plain == checkpointed
    assert plain[0] == plain[1]


def test_numbers_of_a_generator_of_the_script_are_drawn_there(procs: ProcMesh) -> None:
    with procs.activate():
        order = torch.randperm(5, generator=torch.Generator().manual_seed(2))
        assert type(order) is torch.Tensor
        with pytest.raises(LocalTensorError, match="a generator of the script cannot draw numbers"):
            torch.ones(3).normal_(generator=torch.Generator())
        assert at(to_mesh(order, procs)) == [order.tolist()] * 2


class Squares(Dataset[torch.Tensor]):
    """Makes its tensors where it is asked for them."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index)) ** 2


class Noisy(Squares):
    """The same, and a number of the generator of the process that makes it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([super().__getitem__(index), torch.rand(())])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Squares(), TensorDataset(torch.arange(12.0) ** 2)], ids=["made", "held"])
def test_a_loader_gives_what_it_gives_without_a_mesh(procs: ProcMesh, dataset: Dataset[Any], workers: int) -> None:
    def batches() -> list[Any]:
        torch.manual_seed(4)
        loader = DataLoader(
            dataset, batch_size=4, shuffle=True, num_workers=workers, timeout=PATIENCE_S * bool(workers)
        )
        found = list(itertools.chain.from_iterable(batch if isinstance(batch, list) else [batch] for batch in loader))
        assert {type(batch) for batch in found} == {torch.Tensor}
        return [batch.tolist() for batch in found]

    expected = batches()
    with procs.activate():
        assert batches() == expected
        assert isinstance(torch.ones(1), Tensor)  # the mesh is active between them, and after them
    assert sorted(itertools.chain.from_iterable(expected)) == [float(index) ** 2 for index in range(12)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(Squares()),
        RandomSampler(Squares(), replacement=True),
        RandomSampler(Squares(), generator=torch.Generator()),
        SubsetRandomSampler(range(3, 9)),
        WeightedRandomSampler([1, 0, 3, 5], 6),
    ],
    ids=["shuffled", "replaced", "of its own generator", "subset", "weighted"],
)
def test_every_epoch_is_in_the_order_of_one_process(procs: ProcMesh, sampler: Sampler[int], workers: int) -> None:
    def epochs() -> list[Any]:
        if isinstance(sampler, RandomSampler) and sampler.generator is not None:
            sampler.generator.manual_seed(5)
        torch.manual_seed(4)
        loader = DataLoader(
            Noisy() if workers else Squares(),
            batch_size=2,
            sampler=sampler,
            num_workers=workers,
            timeout=PATIENCE_S * bool(workers),
        )
        found: list[Any] = []
        for _ in range(3):
            found.append([batch.tolist() for batch in loader])
            found.append(torch.rand(3))  # as dropout draws between them, on the workers
        return found

    expected = epochs()
    with procs.activate():
        found = epochs()
    assert found[::2] == expected[::2]
    for one, other in zip(found[1::2], expected[1::2], strict=True):
        assert at(one) == [other.tolist()] * 2


def test_the_first_rank_says_in_which_order_samples_come(procs: ProcMesh) -> None:
    def order() -> list[float]:
        return [float(batch) for batch in DataLoader(Squares(), shuffle=True)]

    torch.manual_seed(8)
    expected, here = order(), torch.get_rng_state()
    with procs.activate():
        random.manual_seed(8)  # and the other rank 9
        assert order() == expected
        after = at(torch.rand(2))
        torch.manual_seed(9)
        order()
        assert at(torch.rand(2))[1] == after[1]  # each has drawn from its own
        with no_mesh():
            torch.set_rng_state(here)
        order()
    assert torch.equal(torch.get_rng_state(), here)  # the script's own is untouched


def test_what_is_loaded_is_the_scripts(procs: ProcMesh) -> None:
    file = io.BytesIO()
    torch.save({"w": torch.arange(4.0)}, file)
    file.seek(0)
    with procs.activate():
        loaded = torch.load(file)
        assert type(loaded["w"]) is torch.Tensor
        assert at(to_mesh(loaded["w"], procs)) == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_networks_learn_as_they_do_in_the_script(procs: ProcMesh, kind: type[torch.nn.RNNBase]) -> None:
    here = kind(4, 5, num_layers=2, bidirectional=True)
    x = torch.randn(3, 2, 4)
    there = procs.place(here)
    with procs.activate():
        out = there(procs.place(x))[0]
        out.square().sum().backward()
    expected = here(x)[0]
    expected.square().sum().backward()
    torch.testing.assert_close(inspect(out.detach(), gpus=1, timeout=PATIENCE_S), expected.detach())
    for one, other in zip(there.parameters(), here.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(inspect(one.grad, timeout=PATIENCE_S), other.grad)
