"""transformers' Llama, unmodified, learns over the engine what it learns in plain PyTorch, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from skipper.control import ProcMesh
from skipper.tensor_engine import Tensor, compile, inspect, random
from tests.integration.example_process import run

from .conftest import PATIENCE_S


@pytest.fixture
def example() -> ModuleType:
    """The program: transformers takes seconds to import, which others that run are spared."""
    from examples import train_llama

    return train_llama


@pytest.fixture(autouse=True)
def as_before(procs: ProcMesh) -> Iterator[None]:
    """One thread, as the workers have it, since sums of another order are others; and the generators restored."""
    state, here, threads = random.get_states(mesh=procs), torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    random.set_states(state)
    torch.set_rng_state(here)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # a checkpoint of one process
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # by DCP itself, of PyTorch 2.8
@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_weights_moments_and_rates_are_those_of_plain_torch(
    procs: ProcMesh, example: ModuleType, tmp_path: Path, ranks: int
) -> None:
    epochs = 2  # the second is shuffled by what dropout has left of the generator
    mesh = procs.slice(gpus=slice(ranks)).rename(gpus="dp")
    texts, model = example.make_texts(), example.make_model()
    there = mesh.place(model)
    expected, optimizer = example.train(model, texts, epochs, example.gradients_here(ranks))
    with mesh.activate():
        found, its_optimizer = example.train(there, texts, epochs, example.gradients_on(mesh))
    assert all(isinstance(tensor, Tensor) for tensor in (*there.parameters(), *found))
    losses = [loss.item() for loss in expected]
    for rank in range(ranks):
        assert [inspect(loss, dp=rank, timeout=PATIENCE_S).item() for loss in found] == losses
    assert losses[-1] < losses[0]

    example.save(there, its_optimizer, str(tmp_path))
    loaded, loaded_optimizer = example.load(str(tmp_path))
    for (name, one), other in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert type(other) is torch.nn.Parameter
        assert torch.equal(one, other), name
        moments, its_moments = optimizer.state[one], loaded_optimizer.state[other]
        assert moments.keys() == its_moments.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, moment in moments.items():
            assert torch.equal(moment, its_moments[key]), (name, key)
    assert loaded_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_step_learns_as_plain_torch_does(procs: ProcMesh, dtype: torch.dtype) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    there = procs.place(model)
    words = torch.arange(2 * 16).reshape(2, 16) % 64

    def learner(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

        def step(words: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                loss: torch.Tensor = model(input_ids=words, labels=words).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.detach()

        return step

    plain = learner(model)
    expected = [plain(words) for _ in range(4)]
    compiled = compile(learner(there))
    with procs.activate():
        its_words = torch.arange(2 * 16).reshape(2, 16) % 64
        found = [inspect(compiled(its_words), gpus=1, timeout=PATIENCE_S) for _ in range(4)]
    # A mask that is computed takes another kernel of attention than one that is known to be causal.
    torch.testing.assert_close(found, expected, rtol=1e-5 if dtype == torch.float32 else 1e-3, atol=0)
    assert expected[-1] < expected[0]
    assert compiled.programs == 1
    assert not torch.compiler.is_compiling()


def test_the_example_trains_and_saves() -> None:
    ended = run("examples/train_llama.py", "--epochs", "1", timeout=90.0)
    assert ended.process.returncode == 0, ended.stderr
    header, *steps, difference, weights = ended.stdout.splitlines()[-6:]  # before them speaks gloo of PyTorch 2.8
    assert header.split() == ["step", "PyTorch", "tensor", "engine"]
    assert [line.split()[0] for line in steps] == ["0", "1", "2"]
    assert difference == "largest difference: 0.0e+00"
    assert weights == "weights from the checkpoint: the same"
    assert ended.stderr == ""
