"""The corpus: what engines do with the checkpoints of many architectures, recorded, replayed, and compared.

Each model is made of its config alone. One tensor-parallel rank after another is loaded twice with the same random
values: by its own `load_weights`, and by a plan out of a store.
"""

from collections.abc import Iterator

import pytest
import torch

from skipper import torchstore as ts
from skipper.torchstore import sync
from tests.torchstore.plans.architectures import TEXT, WITH_VISION, made
from tests.torchstore.plans.fusing_engine import FusingEngine, Shapes

COMPUTED = {"mamba", "falcon_mamba", "bamba", "jamba"}
"""Their engines compute -exp(A_log), which no plan has words for. All else is copied."""


@pytest.fixture(scope="module")
def _store() -> Iterator[None]:
    pytest.importorskip("transformers")
    sync.initialize()
    yield
    sync.shutdown()


def random_values(shapes: Shapes) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=chance).to(dtype) for name, (shape, dtype) in shapes.items()}


@pytest.mark.usefixtures("_store")
@pytest.mark.parametrize("kind", [*TEXT, *WITH_VISION])
def test_a_plan_fills_each_rank_as_its_own_load_weights_does(kind: str) -> None:
    config, shapes = made(kind)
    values = random_values(shapes)
    sync.put_state_dict(values, "policy")
    for ranks in (1, 2):
        read = 0
        for rank in range(ranks):
            engine, expected = (FusingEngine(shapes, config, rank, ranks) for _ in range(2))
            expected.load_weights(values.items())
            plan = ts.record_plan(engine, shapes)
            sync.load_by_plan("policy", plan, engine)
            assert not [name for name, own in engine.weights.items() if not torch.equal(own, expected.weights[name])]
            whole = {name.rpartition(".")[2] for group in plan.whole for name in group.names}
            assert whole == ({"A_log"} if kind in COMPUTED else set())
            assert not plan.skipped
            read += plan.nbytes
        every = sum(tensor.nbytes for tensor in values.values())
        assert every <= read < ranks * every or ranks == 1 == read / every
    sync.delete("policy")


def test_there_are_as_many_as_the_documentation_says() -> None:
    assert len({*TEXT, *WITH_VISION}) == 87
